"""The encoders: shapes, memory, what their blocks compute, DropBlock, and the file they are kept in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention.fewshot import encoders, files
from intention.fewshot.encoders import (
    KINDS,
    Conv4,
    ResNet12,
    build,
    drop_squares,
    normalise,
)
from intention.fewshot.files import _path, _read, about_encoder, load_encoder, save_encoder


def images(count: int, size: int = 28, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, size, size, channels), dtype=torch.uint8, generator=generator)


def test_pooling_that_rounds_up_keeps_borders(tmp_path: Path) -> None:
    encoder = build("conv4", 28, 3, 5, round_up=True).eval()
    x = images(2)
    assert encoder.d == 5 * 4
    assert encoder(normalise(x)).shape == (2, 20)
    border = x.clone()
    border[:, -4:] = 0
    plain = build("conv4", 28, 3, 5).eval()
    plain.load_state_dict(encoder.state_dict())
    assert not torch.equal(encoder(normalise(border)), encoder(normalise(x)))
    torch.testing.assert_close(encoder(normalise(x))[:, ::4], plain(normalise(x)))  # the corner that both have
    save_encoder(tmp_path / "encoder.safetensors", encoder)
    loaded = load_encoder(tmp_path / "encoder.safetensors")
    assert torch.equal(loaded(normalise(x)), encoder(normalise(x)))


def settled(kind: str, channels: int = 3, width: int = 5) -> encoders.Encoder:
    """One whose batch norms have seen something: running statistics are not 0 and 1."""
    torch.manual_seed(1)
    encoder = build(kind, 28, channels, width)
    for _ in range(2):
        encoder(normalise(images(7, channels=channels)))
    return encoder.eval()


@pytest.mark.parametrize(("size", "places"), [(28, 1), (32, 4), (84, 25)])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: str, size: int, places: int) -> None:
    encoder = build(kind, size, 3, 5)
    assert encoder.d == (5 * places if kind == "conv4" else 8 * 5)
    assert encoder(normalise(images(2, size))).shape == (2, encoder.d)


def test_images_become_numbers_around_zero_channels_first() -> None:
    x = images(11, 7)
    found = normalise(x)
    assert found.shape == (11, 3, 7, 7)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert float(found[3, 2, 5, 1]) == pytest.approx((int(x[3, 5, 1, 2]) / 255 - 0.45) / 0.27, abs=1e-5)
    assert normalise(x[None]).shape == (1, 11, 3, 7, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_is_channels_last_all_the_way(kind: str) -> None:
    encoder = build(kind, 28, 3, 8)
    seen: list[Tensor] = []
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, args, out: seen.extend([module.weight, args[0], out]))
    encoder(normalise(images(2)))
    assert len(seen) == 3 * (4 if kind == "conv4" else 16)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)


@pytest.mark.parametrize("training", [True, False])
def test_conv4_is_convolution_norm_relu_pooling(training: bool) -> None:
    """Pooling comes before the ReLU in the code, which must change nothing: values nor gradients."""
    encoder = settled("conv4").train(training)
    x = normalise(images(7))

    def plain(x: Tensor) -> Tensor:
        for block in encoder.blocks:  # type: ignore[union-attr]
            conv, norm = block[0], block[1]
            x = nnf.conv2d(x, conv.weight, conv.bias, padding=1)
            means, spreads = (None, None) if training else (norm.running_mean, norm.running_var)
            x = nnf.max_pool2d(nnf.batch_norm(x, means, spreads, norm.weight, norm.bias, training).relu(), 2)
        return x.flatten(1)

    ours, theirs = encoder(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    weights = list(encoder.parameters())
    for one, two in zip(*(torch.autograd.grad(out.square().sum(), weights) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


def test_resnet12_is_four_times_three_convolutions_and_a_shortcut() -> None:
    encoder = settled("resnet12")
    x = normalise(images(3))
    ours = encoder(x)

    def norm(x: Tensor, layer: nn.Module) -> Tensor:
        return nnf.batch_norm(x, *(getattr(layer, name) for name in ("running_mean", "running_var", "weight", "bias")))

    for block in encoder.blocks:  # type: ignore[union-attr]
        path, short = block.path, block.short
        out = x
        for first in (0, 3, 6):
            out = norm(nnf.conv2d(out, path[first].weight, padding=1), path[first + 1])
            out = nnf.leaky_relu(out, 0.1) if first < 6 else out
        x = nnf.leaky_relu(nnf.max_pool2d(out + norm(nnf.conv2d(x, short[0].weight), short[1]), 2), 0.1)
    assert [block.path[0].out_channels for block in encoder.blocks] == [5, 10, 20, 40]  # type: ignore[union-attr]
    torch.testing.assert_close(ours, x.mean((-2, -1)), atol=1e-5, rtol=1e-4)


def test_without_running_statistics_evaluation_uses_the_batch() -> None:
    x = normalise(images(7))
    for running in (True, False):
        torch.manual_seed(1)
        encoder = Conv4(28, 3, 5, running=running)
        assert torch.equal(encoder(x), encoder.eval()(x)) is not running


def test_drop_squares_keeps_the_mean_and_drops_squares() -> None:
    torch.manual_seed(0)
    kept = drop_squares(torch.ones(29, 7, 11, 13), 0.2)
    assert float(kept.mean()) == pytest.approx(1, abs=1e-5)
    dropped = (kept == 0).float()
    # a place is dropped if one of the places around it is a seed; at the border there are fewer of these
    around = nnf.avg_pool2d(torch.ones(1, 1, 11, 13), 3, 1, padding=1) * 9
    expected = 1 - (1 - 0.2 / 9) ** around
    assert float(dropped.mean()) == pytest.approx(float(expected.mean()), abs=0.01)
    assert len(kept.unique()) == 2
    # every dropped place lies in a 3x3 square of dropped ones (beyond the border everything counts as dropped) ...
    outside = nnf.pad(dropped, (2, 2, 2, 2), value=1.0)
    whole = 1 - nnf.max_pool2d(1 - outside, 3, stride=1)  # middles of squares that are dropped as a whole
    assert torch.equal(nnf.max_pool2d(whole, 3, stride=1), dropped)
    # ... and channels differ
    assert not torch.equal(dropped[:, 0], dropped[:, 1])


def test_drop_squares_of_places_smaller_than_a_square() -> None:
    torch.manual_seed(0)
    kept = drop_squares(torch.ones(1000, 3, 1, 1), 0.25)
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert drop_squares(torch.ones(5, 3, 2, 2), 0.25).shape == (5, 3, 2, 2)


def test_dropblock_is_for_training_only() -> None:
    torch.manual_seed(1)
    encoder = ResNet12(28, 3, 4, dropblock=0.5)
    plain = ResNet12(28, 3, 4)
    plain.load_state_dict(encoder.state_dict())
    x = normalise(images(5))
    assert torch.equal(encoder.eval()(x), plain.eval()(x))
    assert not torch.equal(encoder.train()(x), plain.train()(x))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_for_the_convolutions_only(kind: str) -> None:
    torch.manual_seed(1)
    encoder = build(kind, 28, 3, 8, "bfloat16")
    exact = build(kind, 28, 3, 8)
    exact.load_state_dict(encoder.state_dict())
    kinds = set()
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, args, out: kinds.add(out.dtype))
    x = normalise(images(11))
    found, expected = encoder(x), exact(x).detach()
    assert kinds == {torch.bfloat16}
    assert found.dtype == torch.float32
    assert 0 < float((found.detach() - expected).norm() / expected.norm()) < 0.05
    found.sum().backward()
    assert {weight.grad.dtype for weight in encoder.parameters() if weight.grad is not None} == {torch.float32}
    assert all(weight.grad is not None for weight in encoder.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_is_kept_in_a_file(kind: str, tmp_path: Path) -> None:
    encoder = settled(kind, channels=1)
    save_encoder(tmp_path / "encoder.safetensors", encoder)
    again = load_encoder(tmp_path / "encoder.safetensors")
    assert not again.training
    x = normalise(images(3, channels=1))
    assert torch.equal(again(x), encoder(x))
    assert (again.kind, again.size, again.channels, again.width) == (kind, 28, 1, 5)


@pytest.mark.parametrize("wrong", ["text", "other", "kind", "weights", "absent"])
def test_a_file_that_is_no_encoder_is_refused(wrong: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "encoder.safetensors"
    about = '{"kind": "conv4", "size": 28, "channels": 1, "width": 5}'
    if wrong == "text":
        path.write_text("weights")
    elif wrong != "absent":
        metadata = {"other": None, "kind": {"encoder": about.replace("conv4", "vit")}, "weights": {"encoder": about}}
        save_file({"a": torch.zeros(2)}, path, metadata[wrong])
    message = "there is no encoder .*'conv4'" if wrong == "absent" else "(?s)is not an encoder of ours.*save_encoder"
    with pytest.raises(FileNotFoundError if wrong == "absent" else ValueError, match=message):
        load_encoder(path)


def test_the_shipped_encoder_says_what_it_is() -> None:
    assert _path("conv4").stat().st_size <= 500_000
    weights = _read(_path("conv4"))[1]
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {torch.float16}
    about = about_encoder("conv4")
    assert {"data", "recipe", "epochs", "seed", "test", "accuracy", "interval", "classes"} <= set(about)
    encoder = load_encoder("conv4")
    assert not encoder.training
    assert all(w.dtype == torch.float32 for w in encoder.parameters())
    text = (Path(__file__).parents[2] / "docs" / "fewshot.md").read_text(encoding="utf-8")
    accuracy, interval = about["accuracy"], about["interval"]
    assert isinstance(accuracy, float)
    assert isinstance(interval, float)
    assert f"{100 * accuracy:.1f} ± {100 * interval:.1f}% (5-way 5-shot" in " ".join(text.split())


def test_an_encoder_is_found_by_its_name_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CLONE", tmp_path)
    (tmp_path / "encoders").mkdir()
    save_encoder(tmp_path / "encoders" / "resnet12.safetensors", encoders.build("resnet12", 28, 3, 2))
    with pytest.raises(FileNotFoundError, match=r"there is no encoder 'resnet12'.*a name in .*encoders"):
        load_encoder("resnet12")  # not a clone
    (tmp_path / "pyproject.toml").touch()
    assert load_encoder("resnet12").d == 16
    with pytest.raises(FileNotFoundError, match=r"there is no encoder '../encoders/resnet12'"):
        load_encoder("../encoders/resnet12")
