"""Texts of the user and of Python, and claims that can fail."""

import dataclasses
import math

import pytest
import torch

from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import text
from intention.lab.experiments.sequences import GATED, Gated
from intention.lab.experiments.text import task as texts
from intention.lab.experiments.text.figures import parts_table
from intention.lab.experiments.text.parts import ABLATION, PARTS
from lab.made import verdicts

TEXT = dataclasses.replace(text.PRESETS["quick"], steps=2, batch=3, window=11, width=8, evaluation_windows=7)
UNTESTED = "not tested at this size"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_text_is_cut_by_position(written):
    found = texts.load(written, 11)
    content = "All that is gold does not glitter, über alles. " * 23
    assert found.read(found.seen) + found.read(found.unseen) == content
    assert len(found.unseen) == round(0.1 * len(content))
    assert found.name == "mine.txt"
    drawn = texts.sample(found.seen, 501, generator(), window=11)
    assert drawn.tokens.shape == (501, 12)
    assert all(found.read(piece) in content for piece in drawn.tokens[:20])
    pieces = texts.spread(found.unseen, 5, 11)
    assert pieces.tokens.shape == (5, 12)
    assert len(texts.spread(found.unseen, 500, 11).tokens) == len(found.unseen) // 12
    assert found.read(pieces.tokens[0]) == content[len(found.seen) :][:12]


def test_counted_pairs_know_what_follows_what(tmp_path):
    path = tmp_path / "ab.txt"
    path.write_text("ab" * 500)
    found = texts.load(str(path), 9)
    bits = texts.bits_of_pairs(found, texts.spread(found.unseen, 5, 9))
    assert bits.max() < 0.01
    odd = texts.Windows(torch.zeros(1, 10, dtype=torch.long))  # a never follows a
    assert texts.bits_of_pairs(found, odd).item() == pytest.approx(math.log2(450 + 2), abs=0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        (b"\xff\xfe\x00 text" * 200, "is not UTF-8"),
        (b"too short", "wanted at least 240 characters.*got 9; give a longer one"),
        (b"", "wanted at least 240 characters"),
        (b"a" * 1000, "all characters are 'a'"),
    ],
)
def test_a_text_that_does_not_serve_fails_before_any_work(tmp_path, content, message):
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LabError, match=message) as caught:
        text.jobs(dataclasses.replace(TEXT, text=str(path)))
    assert str(path) in str(caught.value)
    with pytest.raises(LabError, match="cannot read"):
        text.jobs(dataclasses.replace(TEXT, text=str(tmp_path)))


def test_documentation_is_that_of_python_and_of_its_modules(tmp_path):
    (tmp_path / "b.py").write_text('"""Second."""\ndef f():\n    """Inside.\n\n    More."""\n')
    (tmp_path / "a.py").write_text('"""First."""\nclass A:\n    """Second."""\n')  # it is there once
    (tmp_path / "broken.py").write_text('"""No.')
    (tmp_path / "latin.py").write_bytes(b'"""\xff"""')
    modules = "First.\n\nSecond.\n\nInside.\n\nMore."
    assert texts.documentation(tmp_path) == modules
    (tmp_path / "LICENSE.txt").write_text("All may.\n")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The if\\nstatement\\n', 'no': 3}\n")
    assert texts.documentation(tmp_path) == "All may.\n\nThe if\nstatement\n\n" + modules


def test_without_a_text_python_itself_has_one():
    found = texts.load("", 64)
    assert 300_000 < len(found.seen) < 3_000_000
    assert found.name.startswith("documentation of Python 3.")
    assert [job.at for job in text.jobs(TEXT)] == [
        {}
    ] * 12  # 6 gated models, 5 plain ones, references: rows of another version of Python are these runs, too


def test_another_text_under_the_same_name_is_another_run(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("abc" * 500)
    config = dataclasses.replace(TEXT, text=str(path))
    first = {job.id for job in text.jobs(config)}
    texts.load.cache_clear()
    path.write_text("abd" * 500)
    assert not first & {job.id for job in text.jobs(config)}


def bits_of(name="mine.txt", **bits):
    return [
        Row("text", "", "quick", {}, model, seed, "bits per character", value, data={"text": name, "characters": 9})
        for model, values in bits.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((2.0, 2.01, 2.0), "holds"),
        ((2.0, 2.4, 2.5), "not decided"),
        ((2.6, 2.6, 2.7), "does not hold"),
        ((2.0, None, 2.0), "does not hold"),
    ],
)
def test_bits_are_compared_seed_by_seed(own, expected):
    others = dict.fromkeys(("linear_attention", "delta", "attention"), (2.5, 2.4, 2.5))
    found = verdicts(text, bits_of(intention=own, **others, counted_pairs=(2.7, 2.6, 2.7)))
    assert found[:4] == [expected, expected, expected, UNTESTED]
    assert found[5:] == [UNTESTED] * 3
    assert verdicts(text, bits_of(intention=own, counted_pairs=(2.5, 2.4, 2.5)))[4] == expected
    assert verdicts(text, bits_of(sigma_intention=own, **others))[3] == expected
    idle = bits_of(intention=own, **others, counted_pairs=(2.4, 2.4, 2.4))  # the others know no more than that
    assert verdicts(text, idle)[:3] == [UNTESTED] * 3


def test_texts_do_not_mix():
    good = bits_of("one", intention=(2.0, 2.0, 2.0), attention=(2.5, 2.5, 2.5))
    bad = bits_of("two", intention=(2.0, 2.0, 2.0), attention=(1.5, 1.5, 1.5))
    assert verdicts(text, good)[2] == "holds"
    assert verdicts(text, [*good, *bad])[2] == "holds in 1 of 2"
    assert verdicts(text, bad)[2] == "does not hold"


def gated(**bits):
    """Bits of models of gated layers; those that are not named have 2.7."""
    return {f"{mixer}_gated": bits.get(mixer, (2.7, 2.7, 2.7)) for mixer in GATED.values()}


@pytest.mark.parametrize(
    ("own", "best", "expected"),
    [
        ((2.61, 2.61, 2.61), (2.6, 2.6, 2.6), "holds"),
        ((2.61, 2.64, 2.7), (2.6, 2.6, 2.6), "not decided"),
        ((2.7, 2.7, 2.7), (2.6, 2.6, 2.6), "does not hold"),
        ((2.61, 2.61, None), (2.6, 2.6, 2.6), "does not hold"),
        ((2.61, 2.61), (2.6, 2.6, 2.6), UNTESTED),  # fewer seeds
        ((2.69, 2.69, 2.69), (2.3, None, 2.3), "holds"),  # one that diverges is not the best
    ],
)
def test_gated_intention_is_beside_the_best_mixer_with_the_same_parts(own, best, expected):
    rows = bits_of(**gated(intention=own, delta=best))
    assert verdicts(text, rows)[6] == expected
    assert verdicts(text, [row for row in rows if row.model != "attention_gated"])[6] == UNTESTED


@pytest.mark.parametrize(
    ("bits", "expected"),
    [((2.6, 2.61, 2.62), "holds"), ((2.6, 2.7, 2.7), "not decided"), ((2.7, 2.7, 2.7), "does not hold")],
)
def test_bits_are_judged_at_the_size_that_they_are_for(bits, expected):
    rows = bits_of(intention_gated=bits)
    assert verdicts(text, rows)[5] == UNTESTED
    full = dataclasses.asdict(text.PRESETS["standard"])
    assert verdicts(text, [dataclasses.replace(row, config=full) for row in rows])[5] == expected
    short = [dataclasses.replace(row, config={**full, "steps": 899}) for row in rows]
    assert verdicts(text, short)[5] == UNTESTED


def test_plain_and_gated_layers_are_compared_on_the_seeds_that_both_have():
    rows = bits_of(intention=(3.4, 3.5), intention_gated=(2.6, 2.7, 9.0))
    assert verdicts(text, rows)[7] == "holds"
    assert verdicts(text, bits_of(intention=(2.4, 2.5), intention_gated=(2.6, 2.7, 0.1)))[7] == "does not hold"


def test_gated_models_have_the_same_number_of_parameters():
    sizes = {}
    for job in text.jobs(dataclasses.replace(text.PRESETS["standard"], seeds=1, parts=())):
        if job.model in GATED:
            sizes[job.model] = sum(weight.numel() for weight in text._built(job, 100).parameters())
    assert set(sizes) == set(GATED)
    assert max(sizes.values()) < 1.03 * min(sizes.values())


def test_parts_are_changed_one_at_a_time_with_less_training(written):
    config = dataclasses.replace(TEXT, models=("intention_gated",), parts=tuple(PARTS), ablation_steps=1, text=written)
    config = dataclasses.replace(config, ablation_seeds=1)
    runs = [job for job in text.jobs(config) if "part" in job.at]
    assert [job.at["part"] for job in runs] == list(PARTS)
    assert len({job.id for job in runs}) == len(runs)
    bits = {}
    for job in runs:
        (measure,) = text.run(job, Place())
        assert measure.metric == ABLATION
        bits[measure.data["part"]] = measure.value
    assert len(set(bits.values())) == len(bits)  # every part makes a difference
    rows = [Row("text", "", "quick", {}, "intention_gated", 0, ABLATION, 2.0, data={"part": "no SiLU"})]
    rows += [Row("text", "", "quick", {}, "intention_gated", 0, ABLATION, 2.5, data={"part": "as it is"})]
    assert parts_table(rows) == [
        ["", "bits per character", "more than as it is"],
        ["as it is", "2.500", "+0.000"],
        ["no SiLU", "2.000", "-0.500"],
    ]


def test_published_runs_of_plain_models_keep_their_names():
    """Whatever gated models have of their own, rows of plain ones stay valid."""
    config = text.PRESETS["standard"]
    names = {job.id for job in text.jobs(config) if job.model == "intention"}
    assert names == {"intention-seed0-77220762", "intention-seed1-77220762"}
    other = dataclasses.replace(config, intention_gated=Gated(1.0))
    changed = {job.id for job in text.jobs(config)} ^ {job.id for job in text.jobs(other)}
    assert {name.split("-")[0] for name in changed} == {"intention_gated"}
