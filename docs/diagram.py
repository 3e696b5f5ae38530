"""Draws the diagrams of the README and of the documentation from one description: python docs/diagram.py

DIAGRAMS, at the end of the description, maps a file's name to its nodes and edges; `draw` turns one of them into SVG.
In a text, _ lowers the character after it, and a line break starts a new line.
"""

from __future__ import annotations

import math
import re
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Node(NamedTuple):
    kind: str  # a key of KINDS
    x: float  # the centre
    y: float
    text: str
    width: float
    height: float = 32


class Edge(NamedTuple):
    source: str
    target: str
    label: str = ""
    dashed: bool = False  # an optional path
    via: tuple[Point, ...] = ()  # corners; without them the edge is one straight line


class Diagram(NamedTuple):
    title: str
    desc: str
    width: float
    height: float
    nodes: dict[str, Node]
    edges: list[Edge]


# ---- the description -----------------------------------------------------------------------------------------------

KVQ_SPACE = Diagram(
    "Four operations in the space of key-value-query models",
    "A frame, KVQ space, holds Intention, sigma-Intention, linear attention, attention and the Neural Process."
    " A softmax leads from Intention to sigma-Intention and from linear attention to attention. As alpha grows, with"
    " scale = alpha, Intention becomes linear attention and sigma-Intention becomes attention.",
    760,
    428,
    {
        "space": Node("frame", 380, 214, "KVQ space", 728, 396),
        "note": Node("note", 438, 39, "the pairs (K, V) have no order; the answers have the order of Q", 576, 22),
        "Intention": Node("intention", 181, 108, "Intention\nQ (K′K + αI)⁻¹ K′ V", 290, 76),
        "σIntention": Node("intention", 579, 108, "σIntention\nsoftmax(Q (K′K + αI)⁻¹ K′) V", 290, 76),
        "linear attention": Node("attention", 181, 244, "linear attention\nQ K′ V", 290, 76),
        "attention": Node("attention", 579, 244, "attention\nsoftmax(Q K′) V", 290, 76),
        "Neural Process": Node("process", 380, 354, "Neural Process\ne_o(Q, mean_i e_c(K_i, V_i))", 290, 76),
    },
    [
        Edge("Intention", "linear attention", "α → ∞, scale = α"),
        Edge("σIntention", "attention", "α → ∞, scale = α"),
        Edge("Intention", "σIntention", "softmax"),
        Edge("linear attention", "attention", "softmax"),
    ],
)


def head(name: str, left: float, intention: bool, softmax: bool) -> tuple[dict[str, Node], list[Edge]]:
    """One head, from Q, K and V at the bottom to the output on top, on rows that all heads share."""
    y = [524 - 56 * row for row in range(9)]
    query, transp, key, value, width = (34, 108, 176, 308, 342) if intention else (34, 108, 108, 180, 214)  # columns
    inverse, whole = (transp + key) / 2, (query + value) / 2
    product = (query + inverse) / 2
    nodes = {
        "head": Node("frame", width / 2, 286, name, width, 540),
        "Q": Node("data", query, y[0], "Q", 44),
        "K": Node("data", key, y[0], "K", 44),
        "V": Node("data", value, y[0], "V", 44),
        "e_Q": Node("embedding", query, y[1], "e_Q", 44),
        "e_K": Node("embedding", key, y[1], "e_K", 44),
        "e_V": Node("embedding", value, y[1], "e_V", 44),
        "transp": Node("operation", transp, y[3], "transp", 68),
        "A": Node("product", product, y[5], f"A = E_Q {'Σ⁻¹ ' * intention}E_K′", 152 if intention else 118),
        "softmax": Node("operation", product, y[6], "softmax", 84),
        "product": Node("product", whole, y[7], f"{'softmax(A)' if softmax else 'A'} E_V", value + 10),
        "output": Node("data", whole, y[8], "output", 84),
        "α": Node("optional", 242, y[1], "α(K, V)", 70),
        "Σ": Node("operation", 209, y[2], "Σ = E_K′E_K + αI", 148),
        "inv": Node("operation", key, y[3], "inv", 52),
        "Σ⁻¹E_K′": Node("product", inverse, y[4], "Σ⁻¹ E_K′", 124),
    }
    edges = [Edge(x, f"e_{x}") for x in "QKV"]
    edges += [Edge("e_Q", "A"), Edge("e_V", "product"), Edge("product", "output")]
    edges += [Edge("A", "softmax"), Edge("softmax", "product")] if softmax else [Edge("A", "product")]
    if intention:
        edges += [Edge("e_K", "transp", via=((left + transp, y[1]),)), Edge("e_K", "Σ"), Edge("Σ", "inv")]
        edges += [Edge("transp", "Σ⁻¹E_K′"), Edge("inv", "Σ⁻¹E_K′"), Edge("Σ⁻¹E_K′", "A")]
        edges += [Edge("K", "α", dashed=True, via=((left + 230, y[0]),)), Edge("α", "Σ", dashed=True)]
        edges += [Edge("V", "α", dashed=True, via=((left + 254, y[0]),))]
    else:
        edges += [Edge("e_K", "transp"), Edge("transp", "A")]
    used = {"head", *(end for edge in edges for end in edge[:2])}
    return (
        {f"{name}/{key}": node._replace(x=left + node.x) for key, node in nodes.items() if key in used},
        [edge._replace(source=f"{name}/{edge.source}", target=f"{name}/{edge.target}") for edge in edges],
    )


FOUR = [
    head("linear attention", 16, intention=False, softmax=False),
    head("attention", 242, intention=False, softmax=True),
    head("Intention", 468, intention=True, softmax=False),
    head("σIntention", 822, intention=True, softmax=True),
]
NOTE = "E_Q = e_Q(Q), likewise E_K, E_V · transp: transpose · inv: inverse · dashed: optional, α from a small network"
HEADS = Diagram(
    "The four heads as computation graphs",
    "Each head embeds Q, K and V. Linear attention multiplies the embedded queries with the transposed keys, and the"
    " result with the values; attention takes a softmax in between. The Intention heads first multiply the transposed"
    " keys with the inverse of Sigma = K'K + alpha I; sigma-Intention takes the softmax too. A dashed, optional path in"
    " the two Intention heads computes alpha from K and V; without it alpha is a constant.",
    1180,
    604,
    {key: node for nodes, _ in FOUR for key, node in nodes.items()} | {"note": Node("note", 590, 578, NOTE, 1148, 22)},
    [edge for _, edges in FOUR for edge in edges],
)

FORMER_LAYER = Diagram(
    "A layer of a -former",
    "The input X, or optionally ReLU(e_X(X)), enters the mixer of each head: attention, linear attention, Intention,"
    " sigma-Intention or Neural Process. The heads are concatenated and mapped by a linear layer to E_Z; X is added,"
    " then LayerNorm gives O_1. An MLP follows; O_1 is added, and a second LayerNorm gives O_2.",
    1080,
    436,
    {
        "X": Node("data", 40, 204, "X", 48),
        "relu": Node("optional", 146, 204, "ReLU(e_X)", 92),
        "mixer": Node("frame", 366, 192, "mixer per head", 208, 352),
        "attention": Node("attention", 366, 84, "attention\nTransformer", 176, 52),
        "linear attention": Node("attention", 366, 144, "linear attention\nLinear Transformer", 176, 52),
        "Intention": Node("intention", 366, 204, "Intention\nInformer", 176, 52),
        "σIntention": Node("intention", 366, 264, "σIntention\nσInformer", 176, 52),
        "Neural Process": Node("process", 366, 324, "Neural Process\nNP-former", 176, 52),
        "linear": Node("embedding", 550, 204, "concat,\nlinear", 84, 56),
        "norm 1": Node("operation", 690, 204, "add &\nLayerNorm", 104, 56),
        "mlp": Node("embedding", 818, 204, "MLP", 60, 56),
        "norm 2": Node("operation", 936, 204, "add &\nLayerNorm", 104, 56),
        "O_2": Node("data", 1040, 204, "O_2", 48),
        "note": Node("note", 888, 408, "dashed: optional · small: name of the stack", 352, 22),
    },
    [
        Edge("X", "relu"),
        Edge("relu", "mixer", "Q, K, V"),
        Edge("mixer", "linear"),
        Edge("linear", "norm 1", "E_Z"),
        Edge("norm 1", "mlp", "O_1"),
        Edge("mlp", "norm 2"),
        Edge("norm 2", "O_2"),
        Edge("X", "norm 1", "residual", via=((40, 398), (690, 398))),
        Edge("norm 1", "norm 2", "residual", via=((690, 140), (936, 140))),
    ],
)

GATED_NOTE = (
    "gates: a sigmoid of a linear function of x · dashed: learnt, the same for all tokens · H, G: the state of a head"
)
GATED_LAYER = Diagram(
    "A gated Intention layer",
    "The token x goes through a linear layer to q, k and v, a convolution over the last four tokens with SiLU, and q"
    " and k get length 1. Intention then lets its two sums H and G fade by gamma, adds k k' and k v' times beta, and"
    " solves (H + lambda) for q. What it reads is multiplied by an output gate and goes through a linear layer to y."
    " Beta, gamma and the output gate come from the token x; lambda is learnt for each channel. H and G are the state"
    " that goes on to the next token.",
    1080,
    424,
    {
        "x": Node("data", 40, 190, "x", 48),
        "linear": Node("embedding", 142, 190, "linear\nq, k, v", 84, 56),
        "convolution": Node("operation", 278, 190, "convolution\n4 taps, SiLU", 132, 56),
        "unit": Node("operation", 416, 190, "q and k of\nlength 1", 104, 56),
        "Intention": Node(
            "intention", 646, 190, "Intention\nH ← γ H + β k k′\nG ← γ G + β k v′\no = q (H + λ)⁻¹ G", 276, 124
        ),
        "β": Node("embedding", 576, 56, "β gate\nhow much is written", 190, 56),
        "λ": Node("optional", 738, 56, "λ > 0\nper channel", 114, 56),
        "γ": Node("embedding", 576, 312, "γ gate\nhow much stays", 148, 56),
        "state": Node("data", 722, 312, "H, G", 84, 32),
        "gate": Node("embedding", 868, 312, "output\ngate", 84, 56),
        "times": Node("product", 868, 190, "o × gate", 92, 32),
        "out": Node("embedding", 966, 190, "linear", 68, 32),
        "y": Node("data", 1044, 190, "y", 40),
        "note": Node("note", 540, 402, GATED_NOTE, 1040, 22),
    },
    [
        Edge("x", "linear"),
        Edge("linear", "convolution"),
        Edge("convolution", "unit"),
        Edge("unit", "Intention"),
        Edge("Intention", "times", "o"),
        Edge("times", "out"),
        Edge("out", "y"),
        Edge("x", "β", via=((40, 56),)),
        Edge("x", "γ", via=((40, 312),)),
        Edge("x", "gate", via=((40, 372), (868, 372))),
        Edge("β", "Intention"),
        Edge("λ", "Intention", dashed=True),
        Edge("γ", "Intention"),
        Edge("gate", "times"),
        Edge("Intention", "state"),
    ],
)

DIAGRAMS = {
    "kvq_space.svg": KVQ_SPACE,
    "heads.svg": HEADS,
    "former_layer.svg": FORMER_LAYER,
    "gated_layer.svg": GATED_LAYER,
}

IN_REPORT = ("kvq_space.svg", "heads.svg", "former_layer.svg")  # the paper's Figures 1, 2 and 12
REPORT = Path(__file__).parents[1] / "src" / "intention" / "lab" / "report" / "pictures"

# ---- the renderer --------------------------------------------------------------------------------------------------

KINDS = {  # fill, stroke, radius of the corners, size of the first line, of the others
    "frame": ("#f2f4f8", "#c5cddb", 12, 17, 17),
    "note": ("none", "none", 0, 14, 14),
    "data": ("#ffffff", "#5b6b86", 16, 16, 16),
    "embedding": ("#e9e4f8", "#7a68b8", 6, 16, 16),
    "operation": ("#fbf2cc", "#b0982f", 6, 16, 16),
    "product": ("#dcf0e1", "#4a9560", 6, 16, 16),
    "optional": ("#ffffff", "#5b6b86", 6, 16, 16),
    "intention": ("#dfeaf9", "#3465b0", 10, 17, 15),
    "attention": ("#fdebd3", "#c28431", 10, 17, 15),
    "process": ("#ffffff", "#8a96aa", 10, 17, 15),
}
BOLD = ("frame", "intention", "attention", "process")  # their first lines are titles
LABEL = 14
STYLE = """text { font-family: "Segoe UI", "Helvetica Neue", Helvetica, Arial, sans-serif; fill: #1b2a4a; }
.bold { font-weight: 600; }
.quiet { fill: #55637c; }
.edge { fill: none; stroke: #55637c; stroke-width: 1.6; }
.dashed { stroke-dasharray: 5 4; }"""
TIP = (
    '<marker id="tip" viewBox="0 0 10 10" refX="9.5" refY="5" markerWidth="10" markerHeight="10" orient="auto" '
    'markerUnits="userSpaceOnUse"><path d="M0 0.5L10 5L0 9.5z" fill="#55637c"/></marker>'
)


def box(node: Node) -> Box:
    across, down = node.width / 2, node.height / 2
    return node.x - across, node.y - down, node.x + across, node.y + down


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An upper estimate for sans-serif fonts: characters times width."""
    return len(text.replace("_", "")) * size * (0.62 if bold else 0.58)


def write(text: str, x: float, y: float, size: float, style: str = "", anchor: str = "middle") -> str:
    def lower(found: re.Match[str]) -> str:  # a space beside a <tspan> may be lost: dx is sure
        dx = ' dx="0.3em"' * len(found[2])
        return f'<tspan dy="4" font-size="0.7em">{found[1]}</tspan><tspan dy="-4"{dx}>{found[3]}</tspan>'

    text = re.sub("_(.)( ?)([^_]*)", lower, escape(text, quote=False)).replace('<tspan dy="-4"></tspan>', "")
    style = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{style}>{text}</text>'


def draw_node(node: Node) -> list[str]:
    fill, stroke, radius, first, other = KINDS[node.kind]
    left, top, _, _ = box(node)
    if node.kind == "note":
        return [write(node.text, left, node.y + 5, first, "quiet", "start")]
    dashed = ' class="dashed"' if node.kind == "optional" else ""
    bold = "bold" if node.kind in BOLD else ""
    rect = (
        f'<rect x="{left:g}" y="{top:g}" width="{node.width:g}" height="{node.height:g}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dashed}/>'
    )
    if node.kind == "frame":
        return [rect, write(node.text, left + 16, top + 28, first, bold, "start")]
    title, *lines = node.text.split("\n")
    step = min(26, 22 * node.height / 56)
    y = node.y - step * len(lines) / 2 + 0.35 * first
    return [
        rect,
        write(title, node.x, y, first, bold),
        *(write(line, node.x, y + step * i, other) for i, line in enumerate(lines, 1)),
    ]


def route(diagram: Diagram, edge: Edge) -> list[Point]:
    """From border to border through the edge's corners; a straight edge runs through the middle of the smaller box."""
    a, b = diagram.nodes[edge.source], diagram.nodes[edge.target]
    (al, at, ar, ab), (bl, bt, br, bb) = box(a), box(b)
    x, y = min((a.width, a.x), (b.width, b.x))[1], min((a.height, a.y), (b.height, b.y))[1]
    if max(al, bl) <= x <= min(ar, br):  # one stands above the other
        y = (max(at, bt) + min(ab, bb)) / 2
    else:
        x = (max(al, bl) + min(ar, br)) / 2
    corners = edge.via or ((x, y),)
    (x1, y1), (x2, y2) = corners[0], corners[-1]
    start = min(max(x1, al), ar), min(max(y1, at), ab)  # the point of the box nearest to the corner
    end = min(max(x2, bl), br), min(max(y2, bt), bb)
    return [start, *edge.via, end]


def label_box(points: list[Point], label: str) -> Box:
    """Above the longest piece of the edge, or to the right of it if that is vertical."""
    (x1, y1), (x2, y2) = max(pairwise(points), key=lambda piece: math.dist(*piece))
    width, x, y = text_width(label, LABEL), (x1 + x2) / 2, (y1 + y2) / 2
    return (x + 10, y - 9, x + 10 + width, y + 9) if x1 == x2 else (x - width / 2, y - 22, x + width / 2, y - 4)


def draw_edge(diagram: Diagram, edge: Edge) -> list[str]:
    points = route(diagram, edge)
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    parts = [f'<path d="{path}" class="edge{" dashed" * edge.dashed}" stroke-linejoin="round" marker-end="url(#tip)"/>']
    if edge.label:
        left, top, right, _ = label_box(points, edge.label)
        parts.append(write(edge.label, (left + right) / 2, top + 14, LABEL, "quiet"))
    return parts


def draw(diagram: Diagram) -> str:
    width, height = f"{diagram.width:g}", f"{diagram.height:g}"
    nodes = sorted(diagram.nodes.values(), key=lambda n: n.kind != "frame")  # frames lie behind
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(diagram.title, quote=False)}</title>',
        f'<desc id="desc">{escape(diagram.desc, quote=False)}</desc>',
        f"<style>{STYLE}</style>",
        f"<defs>{TIP}</defs>",
        f'<rect width="{width}" height="{height}" rx="14" fill="#ffffff"/>',  # so that it is read on dark pages too
        *(part for node in nodes for part in draw_node(node)),
        *(part for edge in diagram.edges for part in draw_edge(diagram, edge)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    for name, diagram in DIAGRAMS.items():
        Path(__file__).with_name(name).write_text(draw(diagram), encoding="utf-8")
        if name in IN_REPORT:
            (REPORT / name).write_text(draw(diagram), encoding="utf-8")
