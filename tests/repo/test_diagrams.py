"""The diagrams of the README and of the documentation: what docs/diagram.py describes is what the files show."""

import importlib.util
import math
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def load():
    spec = importlib.util.spec_from_file_location("diagram", DOCS / "diagram.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


diagram = load()
every = pytest.mark.parametrize("name", diagram.DIAGRAMS)
HEADS = diagram.DIAGRAMS["heads.svg"]


def boxes(drawn, frames=False):
    """Name to box, of the frames or of what is in them."""
    return {k: diagram.box(n) for k, n in drawn.nodes.items() if (n.kind == "frame") == frames}


def labels(drawn):
    return {e[:2]: diagram.label_box(diagram.route(drawn, e), e.label) for e in drawn.edges if e.label}


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a, b, margin=0):
    return a[0] >= b[0] + margin and a[1] >= b[1] + margin and a[2] <= b[2] - margin and a[3] <= b[3] - margin


def span(start, end):
    return min(start[0], end[0]), min(start[1], end[1]), max(start[0], end[0]), max(start[1], end[1])


@every
def test_the_file_is_what_the_description_draws(name):
    """After a change: `python docs/diagram.py`."""
    assert (DOCS / name).read_bytes() == diagram.draw(diagram.DIAGRAMS[name]).encode()


@pytest.mark.parametrize("name", diagram.IN_REPORT)
def test_the_report_has_the_same_file(name):
    assert (diagram.REPORT / name).read_bytes() == (DOCS / name).read_bytes()


def test_every_picture_is_described():
    plots = {"depth.svg"}  # drawn from results by benchmarks/pages/depth_figure.py
    assert {p.name for p in DOCS.glob("*.svg")} == set(diagram.DIAGRAMS) | plots


@every
def test_the_file_is_a_picture_with_a_title_and_a_description(name):
    root = ElementTree.parse(DOCS / name).getroot()
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    found = {root.find(f"{SVG}{tag}").get("id"): root.find(f"{SVG}{tag}").text for tag in ("title", "desc")}
    assert root.get("aria-labelledby").split() == list(found) == ["title", "desc"]
    assert 10 < len(found["title"]) < len(found["desc"])
    drawn = diagram.DIAGRAMS[name]
    assert len(root.findall(f"{SVG}path")) == len(drawn.edges)
    assert root.find(f"{SVG}rect").get("fill") == "#ffffff"  # the panel: dark pages do not shine through


@every
def test_edges_join_nodes_that_exist(name):
    drawn = diagram.DIAGRAMS[name]
    for edge in drawn.edges:
        assert edge.source in drawn.nodes, edge
        assert edge.target in drawn.nodes, edge
        assert edge.source != edge.target, edge
    assert len({edge[:2] for edge in drawn.edges}) == len(drawn.edges)


@every
def test_edges_run_along_the_axes_from_border_to_border_past_other_nodes(name):
    drawn = diagram.DIAGRAMS[name]
    for edge in drawn.edges:
        points = diagram.route(drawn, edge)
        for start, end in pairwise(points):
            assert (start[0] == end[0]) != (start[1] == end[1]), (edge, start, end)
            for other, it in boxes(drawn).items():
                assert not overlap(span(start, end), it), (edge, other)
        first, last = diagram.box(drawn.nodes[edge.source]), diagram.box(drawn.nodes[edge.target])
        for (x, y), (left, top, right, bottom) in ((points[0], first), (points[-1], last)):
            assert (x in (left, right) and top < y < bottom) or (y in (top, bottom) and left < x < right), edge
        assert math.dist(*points[-2:]) >= 16, edge  # room for the tip


@every
def test_boxes_and_labels_do_not_overlap(name):
    drawn = diagram.DIAGRAMS[name]
    everything = boxes(drawn) | labels(drawn)
    for (a, one), (b, two) in combinations(everything.items(), 2):
        assert not overlap(one, two), (a, b)
    for (a, one), (b, two) in combinations(boxes(drawn, frames=True).items(), 2):
        assert not overlap(one, two), (a, b)
    for frame, outer in boxes(drawn, frames=True).items():
        title = (outer[0] + 16, outer[1] + 8, outer[0] + 16 + width(drawn.nodes[frame], 0), outer[1] + 34)
        for key, it in everything.items():
            assert inside(it, outer, 8) or not overlap(it, outer), (frame, key)
            assert not overlap(it, title), (frame, key)
    for key, it in (everything | boxes(drawn, frames=True)).items():
        assert inside(it, (0, 0, drawn.width, drawn.height), 8), key


@every
def test_labels_do_not_lie_on_edges(name):
    drawn = diagram.DIAGRAMS[name]
    for key, it in labels(drawn).items():
        for edge in drawn.edges:
            for start, end in pairwise(diagram.route(drawn, edge)):
                assert not overlap(span(start, end), it), (key, edge)


def width(node, line):
    size = diagram.KINDS[node.kind][4 if line else 3]
    return diagram.text_width(node.text.split("\n")[line], size, node.kind in diagram.BOLD and not line)


@every
def test_text_fits_its_box(name):
    for key, node in diagram.DIAGRAMS[name].nodes.items():
        lines = node.text.split("\n")
        margin = {"frame": 32, "note": 0}.get(node.kind, 4)
        for line in range(len(lines)):
            assert width(node, line) + margin <= node.width, (key, lines[line])
        sizes = [diagram.KINDS[node.kind][4 if line else 3] for line in range(len(lines))]
        assert 1.2 * sum(sizes) <= node.height, key


@pytest.mark.parametrize("head", ["Intention", "σIntention"])
def test_alpha_is_an_optional_path_of_the_intention_heads(head):
    assert HEADS.nodes[f"{head}/α"].kind == "optional"
    path = {(e.source, e.target): e.dashed for e in HEADS.edges if f"{head}/α" in e[:2]}
    assert path == {(f"{head}/{a}", f"{head}/{b}"): True for a, b in ("Kα", "Vα", "αΣ")}


def test_nothing_else_in_the_heads_is_optional():
    for head in ("linear attention", "attention"):
        names = [key for key in HEADS.nodes if key.startswith(f"{head}/")]
        assert names
        assert not {f"{head}/{part}" for part in ("α", "Σ", "inv")} & set(names)
        assert not any("α" in HEADS.nodes[key].text for key in names)
    assert sum(edge.dashed for edge in HEADS.edges) == 6
    root = ElementTree.parse(DOCS / "heads.svg").getroot()
    assert [p.get("class") for p in root.findall(f"{SVG}path")].count("edge dashed") == 6
    assert [r.get("class") for r in root.findall(f"{SVG}rect")].count("dashed") == 2


@pytest.mark.parametrize(
    ("head", "steps"),
    [
        ("linear attention", "e_K transp A product output"),
        ("attention", "e_K transp A softmax product output"),
        ("Intention", "e_K Σ inv Σ⁻¹E_K′ A product output"),
        ("σIntention", "e_K Σ inv Σ⁻¹E_K′ A softmax product output"),
    ],
)
def test_the_heads_compute_their_formulas(head, steps):
    edges = {
        tuple(end.removeprefix(f"{head}/") for end in e[:2]) for e in HEADS.edges if e.source.startswith(f"{head}/")
    }
    assert set(pairwise(["K", *steps.split()])) <= edges
    assert {("Q", "e_Q"), ("e_Q", "A"), ("V", "e_V"), ("e_V", "product")} <= edges
    assert ("A", "softmax") in edges or ("A", "product") in edges
    assert not {("A", "softmax"), ("A", "product")} <= edges
    formula = HEADS.nodes[f"{head}/A"].text
    assert formula == ("A = E_Q Σ⁻¹ E_K′" if "Σ" in steps else "A = E_Q E_K′")
    assert HEADS.nodes[f"{head}/product"].text == ("softmax(A) E_V" if "softmax" in steps else "A E_V")


def test_the_space_holds_the_operations_and_their_limits():
    drawn = diagram.DIAGRAMS["kvq_space.svg"]
    (frame,) = boxes(drawn, frames=True).values()
    assert all(inside(it, frame) for it in boxes(drawn).values())
    assert {(e.source, e.target): e.label for e in drawn.edges} == {
        ("Intention", "linear attention"): "α → ∞, scale = α",
        ("σIntention", "attention"): "α → ∞, scale = α",
        ("Intention", "σIntention"): "softmax",
        ("linear attention", "attention"): "softmax",
    }


def test_the_layer_adds_before_it_normalises():
    drawn = diagram.DIAGRAMS["former_layer.svg"]
    edges = [edge[:2] for edge in drawn.edges]
    assert set(pairwise(["X", "relu", "mixer", "linear", "norm 1", "mlp", "norm 2", "O_2"])) < set(edges)
    assert {("X", "norm 1"), ("norm 1", "norm 2")} < set(edges)
    assert drawn.nodes["relu"].kind == "optional"
    mixer = diagram.box(drawn.nodes["mixer"])
    held = {key for key, it in boxes(drawn).items() if inside(it, mixer)}
    assert held == {"attention", "linear attention", "Intention", "σIntention", "Neural Process"}


def test_the_gated_layer_has_its_parts_in_order():
    drawn = diagram.DIAGRAMS["gated_layer.svg"]
    edges = {edge[:2]: edge.dashed for edge in drawn.edges}
    assert set(pairwise(["x", "linear", "convolution", "unit", "Intention", "times", "out", "y"])) < set(edges)
    assert {(a, b) for a, b in edges if b == "Intention"} == {(a, "Intention") for a in ("unit", "β", "γ", "λ")}
    assert {("x", "β"), ("x", "γ"), ("x", "gate"), ("gate", "times"), ("Intention", "state")} < set(edges)
    assert [pair for pair, dashed in edges.items() if dashed] == [("λ", "Intention")]  # of no token
