"""The built-in data: characters of several scripts, drawn with the fonts that matplotlib brings, then distorted.

It needs no download and is meant for few-shot learning: 389 classes of 40 grey images of 28 x 28, in disjoint
classes for training, validation and test.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from intention.lab.data.kinds import Labelled, split_classes

__all__ = ["CHARACTERS", "IMAGES", "distort", "draw", "drawings", "glyphs"]

SIZE, IMAGES = 28, 40
_DRAWN = 64  # characters are drawn at this size, and the longer side of their ink is _INK
_INK = 46
_CHUNK = 2048  # images at a time, for the sake of memory

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
# Characters that four or more of these fonts have. One that looks like an earlier one is left out, for instance
# C beside c, or Latin, Greek and Cyrillic A: in DejaVu Sans the blurred drawings of any two correlate less than 0.9.
CHARACTERS = (
    "01234578"
    "ACDEHJKLMNPQRTUVWXYZabdefikmnpqrstÆÐØÞßæðħŁŒƁƄƆƇƈƊƐƒƕƛƜƝƢƣƤƥƦƩƫƱƳƴƺƾǁǤǥǶȜȡȣȤȴȵȸȹȻȾȿɀɁɂɆɊɍɏɕɗɘɚɝɠɣɦɧɬɮɯɰɱɲɷɸɹɺɻɽɿʁʂʇʉʍ"
    "ʐʑʓʕʞʡʤʥʦʧʨʩʪʫʬʭʮʯᴃᴎᴑᴒᴓᴖᴗᴙᴚᴝᴞᴟẞỺⱣⱤⱥⱦⱧⱨⱩⱪⱮⱱⱲⱴⱵ"
    "ͲͳΔΞΨΩαζμνπςφωϗϞϟϠϡϺϻᴦ"
    "ЂЉЋЏДЖФЧЩЫЮфцъьћѢѣѤѦѨѪѬѮѰѴѸѹѼѾҊґҖҘҞҟҠҤҦҨҲҴҹҼҾӃӆӇӌӎӶӺԀԂԄԅԆԉԎԒԔԖԗԘԟԠԥ"
    "ԲԳԵԶԸԹԺԻԾԿՀՂՃՄՆՇՊՌՎՒՔՖդթխնչվփ"
    "ႡႢႥႧႨႩႪႫႮႰႵႸႼႾႿჁჃჄჅბდეთკლნრუფქჭჯჰჲჴჷჸჹⴀⴄⴆⴈⴉⴋⴌⴎⴏⴐⴑⴓⴕⴘⴚⴜⴟⴠⴡⴢ"
    "אבדלמףץצקרשױײ"
    "ກຂຄຊຍຕຖທນຜຝພຢຣລສຫຮຯະຽແໂໃ໑໒໓໕໖໘"
)

# How much an image differs from the drawn character; a side of the image has length 2.
ROTATION, SHEAR, SCALE, SHIFT, BEND, NOISE = 0.25, 0.2, 0.15, 0.15, 0.08, 0.06


@functools.lru_cache(maxsize=1)
def glyphs(seed: int = 0) -> dict[str, Labelled]:
    """Parts train, val and test with disjoint classes; the same for the same seed."""
    drawn, of = drawings()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.cat([some[torch.randint(len(some), (IMAGES,), generator=generator)] for some in of])
    x = torch.cat([distort(drawn[some], generator) for some in chosen.split(_CHUNK)])
    y = torch.arange(len(CHARACTERS)).repeat_interleave(IMAGES)
    return split_classes(Labelled(x[..., None], y, tuple(CHARACTERS)), seed=seed)


def drawings() -> tuple[Tensor, list[Tensor]]:
    """Each character in each font that has it, with thin, normal and thick strokes: (n, 64, 64) of uint8.

    And for each character the indices of its own drawings.
    """
    import matplotlib
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    drawn: list[np.ndarray] = []
    of: list[list[int]] = [[] for _ in CHARACTERS]
    for name in FONTS:
        file = str(folder / f"{name}.ttf")
        known, font = FT2Font(file).get_charmap(), ImageFont.truetype(file, _INK)
        for index, character in enumerate(CHARACTERS):
            if ord(character) in known:
                of[index].append(len(drawn))
                drawn.append(draw(character, font))
    normal = torch.from_numpy(np.stack(drawn))
    indices = [torch.tensor(some) for some in of]
    strokes = torch.cat([normal, _thicker(normal), 255 - _thicker(255 - normal)])
    return strokes, [torch.cat([some, some + len(normal), some + 2 * len(normal)]) for some in indices]


def draw(character: str, font: Any) -> np.ndarray:
    """The character's ink, scaled to one size and centred: how large a script is drawn tells nothing."""
    from PIL import Image

    mask = font.getmask(character)
    ink = Image.frombytes("L", mask.size, bytes(mask))
    ink = ink.crop(ink.getbbox())
    scale = _INK / max(ink.size)
    width, height = (max(round(scale * side), 1) for side in ink.size)
    canvas = Image.new("L", (_DRAWN, _DRAWN))
    canvas.paste(ink.resize((width, height)), ((_DRAWN - width) // 2, (_DRAWN - height) // 2))
    return np.array(canvas)


def _thicker(image: Tensor) -> Tensor:
    """The largest of each pixel and its right and lower neighbours."""
    image = torch.maximum(image, image.roll(1, -1))
    return torch.maximum(image, image.roll(1, -2))


def distort(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Images (n, 28, 28) of uint8 from drawn characters (n, 64, 64), each with its own random distortion."""
    count, side = len(drawn), 2 * SIZE  # twice the size first, for smooth edges

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(count, *shape, generator=generator) - 1  # in [-1, 1)

    place = torch.linspace(-1, 1, side)
    places = torch.stack([place.expand(side, side), place[:, None].expand(side, side), torch.ones(side, side)], -1)
    grid = (places.reshape(-1, 3) @ _affine(uniform(6))).reshape(count, side, side, 2)
    hats = (1 - (1.5 * (place[:, None] - torch.linspace(-1, 1, 4))).abs()).clamp(min=0)  # (side, 4), linear in between
    grid += torch.einsum("ia,jb,nabc->nijc", hats, hats, BEND * uniform(4, 4, 2))
    image = F.grid_sample(drawn[:, None].float() / 255, grid, align_corners=False)
    image = F.avg_pool2d(image, 2)
    image = image.lerp(F.avg_pool2d(image, 3, 1, 1), uniform(1, 1, 1).clamp(min=0))  # half of them are blurred
    image = image * (0.8 + 0.2 * uniform(1, 1, 1))  # contrast
    image = image + NOISE * torch.randn(image.shape, generator=generator)
    return (255 * image[:, 0]).round().clamp(0, 255).to(torch.uint8)


def _affine(u: Tensor) -> Tensor:
    """Maps (n, 3, 2) of (x, y, 1) in the image to the drawing, from numbers u (n, 6) in [-1, 1)."""
    angle, shear = ROTATION * u[:, 0], SHEAR * u[:, 1]
    wide, high = (SCALE * u[:, 2]).exp(), (SCALE * u[:, 3]).exp()
    cos, sin = angle.cos(), angle.sin()
    to_x = [cos * wide, (shear * cos - sin) * high, SHIFT * u[:, 4]]
    to_y = [sin * wide, (shear * sin + cos) * high, SHIFT * u[:, 5]]
    return torch.stack([torch.stack(to_x, 1), torch.stack(to_y, 1)], 2)
