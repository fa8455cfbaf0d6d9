"""Small floating-point formats and the blocks made of them, bit by bit: what an FP4 or FP8 record does to numbers.

    >>> block = encode_block([1.25, -2.5, 0.3, 6.0], "mxfp4")
    >>> block.scale, block.decoded, [E2M1.bits(code) for code in block.codes]
    (1.0, (1.0, -2.0, 0.5, 6.0), ['0|01|0', '1|10|0', '0|00|1', '0|11|1'])

All arithmetic is that of `model.quant`, float32 step by step, in the standard library. Source: V4.1 report 2.4.4 and
the released kernels; OCP microscaling formats 1.0 for E2M1 and UE8M0.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

from flashsim.drawing import INK, LESS, MORE, MUTED, RULE, Drawing, FigureError, new_figure, styled
from flashsim.formats import FP4, MXFP4, MXFP8, BlockFormat

SIGN, EXPONENT, MANTISSA = "#CC79A7", "#56B4E9", "#F0E442"


def f32(x: float) -> float:
    """x rounded to float32; beyond its range infinity."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


@dataclass(frozen=True)
class NumberFormat:
    """A sign, exponent and mantissa in a few bits: (-1)^s 2^(e - bias) (1 + m), and 2^(1 - bias) m where e is 0.

    `nan_code` is the one code that is not a number, or None. There is no infinity.
    """

    name: str
    sign_bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_code: int | None = None

    @property
    def width(self) -> int:
        """Bits of a number."""
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """The finite values that are not negative, in ascending order: place n holds the value of code n.

        >>> E2M1.magnitudes
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        """
        codes = range(2 ** (self.exponent_bits + self.mantissa_bits))
        return tuple(self._magnitude(code) for code in codes if code != self.nan_code)

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = code >> self.mantissa_bits, code % 2**self.mantissa_bits
        fraction = mantissa / 2**self.mantissa_bits
        if exponent == 0 and self.mantissa_bits:
            return math.ldexp(fraction, 1 - self.bias)
        return math.ldexp(1 + fraction, exponent - self.bias)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.magnitudes[-1]

    def decode(self, code: int) -> float:
        """The value of a code; NaN where it is none.

        Raises:
            FigureError: the code does not fit the format.
        """
        if not 0 <= code < 2**self.width:
            raise FigureError("code", code, f"0 to {2**self.width - 1} in {self.name}")
        half = 2 ** (self.exponent_bits + self.mantissa_bits)
        negative, code = divmod(code, half)
        if code == self.nan_code:
            return math.nan
        return -self.magnitudes[code] if negative else self.magnitudes[code]

    def encode(self, x: float) -> int:
        """The code of the nearest value; a tie goes to the even code, and what is too large to the largest value.

        >>> [E2M1.decode(E2M1.encode(x)) for x in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0)]
        [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
        """
        size = min(abs(x), self.largest)
        high = bisect_left(self.magnitudes, size)
        if self.magnitudes[high] != size:
            below, above = size - self.magnitudes[high - 1], self.magnitudes[high] - size
            if below < above or (below == above and high % 2):
                high -= 1
        negative = self.sign_bits and math.copysign(1, x) < 0
        return high + (2 ** (self.exponent_bits + self.mantissa_bits) if negative else 0)

    def ties(self) -> list[tuple[float, float]]:
        """Every point halfway between two neighbours of the positive half, and the value that it is rounded to."""
        pairs = zip(self.magnitudes, self.magnitudes[1:], strict=False)
        return [((a + b) / 2, self.decode(self.encode((a + b) / 2))) for a, b in pairs]

    def bits(self, code: int) -> str:
        """The code as sign, exponent and mantissa: `1|10|0`; a part without bits is left out."""
        text, parts = format(code, f"0{self.width}b"), []
        for width in (self.sign_bits, self.exponent_bits, self.mantissa_bits):
            if width:
                parts.append(text[:width])
            text = text[width:]
        return "|".join(parts)


E2M1 = NumberFormat("E2M1", 1, 2, 1, 1)
E4M3 = NumberFormat("E4M3", 1, 4, 3, 7, nan_code=0x7F)
UE8M0 = NumberFormat("UE8M0", 0, 8, 0, 127, nan_code=0xFF)


def power_of_two_above(y: float) -> int:
    """The UE8M0 code of the smallest power of two that is at least y > 0; NaN's for infinity and NaN.

    >>> [UE8M0.decode(power_of_two_above(y)) for y in (1.0, 1.5, 3e-5)]
    [1.0, 2.0, 3.0517578125e-05]
    """
    if not math.isfinite(y):
        return UE8M0.nan_code
    mantissa, exponent = math.frexp(y)  # y = mantissa 2^exponent, mantissa from 0.5
    return exponent - (mantissa == 0.5) + UE8M0.bias


@dataclass(frozen=True)
class BlockKind:
    """A block format with its number formats; a scale is set by the largest magnitude, and at least by `floor`."""

    form: BlockFormat
    element: NumberFormat
    scale: NumberFormat
    floor: float

    def scale_code(self, largest: float) -> int:
        """The code of the scale of a block whose largest magnitude this is."""
        if not math.isfinite(largest):
            return self.scale.nan_code
        largest = max(largest, f32(self.floor))
        if self.scale is E4M3:
            return E4M3.encode(f32(largest / self.element.largest))
        return power_of_two_above(f32(largest * f32(1 / self.element.largest)))


KINDS = {
    "fp4": BlockKind(FP4, E2M1, E4M3, 6 * 2.0**-9),
    "mxfp4": BlockKind(MXFP4, E2M1, UE8M0, 6 * 2.0**-126),
    "mxfp8": BlockKind(MXFP8, E4M3, UE8M0, 1e-4),
}
"""The formats of a V4.1 record: compressed entries, indexer keys and queries, window."""


@dataclass(frozen=True)
class Block:
    """Numbers of one block as they are stored: `scale_code` and `codes`, and what comes back: `scale` and `decoded`."""

    kind: BlockKind
    values: tuple[float, ...]
    scale_code: int
    codes: tuple[int, ...]

    @property
    def scale(self) -> float:
        """What every code is multiplied by."""
        return self.kind.scale.decode(self.scale_code)

    @property
    def scaled(self) -> tuple[float, ...]:
        """The values divided by the scale: what is rounded."""
        return tuple(f32(v / self.scale) for v in self.values)

    @property
    def decoded(self) -> tuple[float, ...]:
        """Code times scale, exact."""
        return tuple(self.kind.element.decode(code) * self.scale for code in self.codes)

    @property
    def errors(self) -> tuple[float, ...]:
        """Decoded less value."""
        return tuple(d - v for d, v in zip(self.decoded, self.values, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of so many elements and one scale, an odd half byte filled up."""
        return -(-len(self.codes) * self.kind.form.element_bits // 8) + self.kind.form.scale_bits // 8

    def packed(self) -> bytes:
        """The bytes as they are stored: codes, two FP4 codes a byte with the even one in the low bits, then the scale.

        >>> encode_block([1.0, -2.0], "mxfp4").packed().hex(" ")
        'e4 7e'
        """
        codes = self.codes
        if self.kind.form.element_bits == 4:
            codes = codes + (0,) * (len(codes) % 2)
            codes = tuple(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True))
        return bytes((*codes, self.scale_code))

    def table(self) -> list[dict[str, float | str]]:
        """One row an element."""
        names = ("value", "value_over_scale", "bits", "decoded", "error")
        bits = [self.kind.element.bits(code) for code in self.codes]
        columns = (self.values, self.scaled, bits, self.decoded, self.errors)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def encode_block(values: Sequence[float], kind: str = "fp4") -> Block:
    """One block of numbers as `fp4` (up to 16), `mxfp4` or `mxfp8` (up to 32) keeps it.

    Values are taken as float32. A block with NaN or infinity gets a NaN scale: none of it decodes to a number.

    Raises:
        FigureError: another kind, no numbers, or more than a block holds.
    """
    if kind not in KINDS:
        raise FigureError("kind", repr(kind), ", ".join(KINDS))
    chosen, numbers = KINDS[kind], values.tolist() if hasattr(values, "tolist") else list(values)
    most = chosen.form.block_size
    if not 1 <= len(numbers) <= most:
        raise FigureError("values", f"{len(numbers)} numbers", f"1 to {most} in a block of {kind}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real):
            raise FigureError("values", f"a list with {number!r}", "numbers")
    numbers = tuple(f32(float(v)) for v in numbers)
    bad = any(not math.isfinite(v) for v in numbers)
    scale_code = chosen.scale_code(math.nan if bad else max(abs(v) for v in numbers))
    scale = chosen.scale.decode(scale_code)
    codes = tuple(0 if bad else chosen.element.encode(f32(v / scale)) for v in numbers)
    return Block(chosen, numbers, scale_code, codes)


def short(x: float) -> str:
    """A number in five significant digits: `0.37500` is `0.375`."""
    return f"{x:.5g}"


def _bit_boxes(ax, x: float, y: float, number: NumberFormat, code: int) -> None:
    """The bits of a code as boxes from x on, a box one unit wide."""
    from matplotlib.patches import Rectangle

    colours = [SIGN] * number.sign_bits + [EXPONENT] * number.exponent_bits + [MANTISSA] * number.mantissa_bits
    for i, (bit, colour) in enumerate(zip(format(code, f"0{number.width}b"), colours, strict=True)):
        ax.add_patch(Rectangle((x + i, y - 0.4), 1, 0.8, facecolor=colour, edgecolor="white", linewidth=1))
        ax.text(x + i + 0.5, y, bit, ha="center", va="center", fontsize=8.5, color=INK, family="monospace")


@styled
def block_bits(block: Block, title: str = "", name: str = "block-bits") -> Drawing:
    """A block, one element a line: value, value over scale, the bits that are stored, decoded value, error."""
    kind, element = block.kind, block.kind.element
    lines = len(block.values)
    title = title or f"{lines} numbers as {kind.form.name.split()[0]} with one {kind.scale.name} scale"
    bits_at, wide = 11.0, max(element.width, kind.scale.width)
    decoded_at, error_at = bits_at + wide + 4.5, bits_at + wide + 5.5
    note = (
        f"pink: sign, blue: exponent, yellow: mantissa. Stored: {lines} x {element.width} + {kind.scale.width} bits. "
        "Bars: error in units of the scale"
    )
    figure, ax = new_figure(7.8, 0.235 * (lines + 2) + 1.1, title, note)
    ax.set(xlim=(0, error_at + 9.5), ylim=(lines + 0.6, -2.0))
    ax.axis("off")
    heads = ((4.4, "value"), (9.8, "value / scale"), (decoded_at, "decoded"))
    for x, text in heads:
        ax.text(x, -0.3, text, ha="right", va="center", color=MUTED)
    ax.text(bits_at, -0.3, "stored bits", va="center", color=MUTED)
    ax.text(error_at + 4.5, -0.3, "error", ha="center", va="center", color=MUTED)
    ax.text(9.8, -1.4, f"scale {short(block.scale)}", ha="right", va="center", fontweight="bold")
    _bit_boxes(ax, bits_at, -1.4, kind.scale, block.scale_code)
    ax.axvline(error_at + 4.5, 0, lines / (lines + 2.6), color=RULE)
    steps = [e / block.scale if math.isfinite(e) else 0.0 for e in block.errors]
    longest = max(max(abs(s) for s in steps), 0.25)
    for i, row in enumerate(block.table()):
        y = i + 0.7
        ax.text(4.4, y, short(row["value"]), ha="right", va="center")
        ax.text(9.8, y, short(row["value_over_scale"]), ha="right", va="center", color=MUTED)
        _bit_boxes(ax, bits_at, y, element, block.codes[i])
        ax.text(decoded_at, y, short(row["decoded"]), ha="right", va="center", fontweight="bold")
        ax.barh(y, 3.0 * steps[i] / longest, 0.55, left=error_at + 4.5, color=MORE if steps[i] > 0 else LESS)
        if steps[i]:
            side = 3.0 * steps[i] / longest
            ax.text(
                error_at + 4.5 + side + math.copysign(0.2, side), y, f"{row['error']:.3g}",
                ha="left" if side > 0 else "right", va="center", fontsize=7.5, color=MUTED,
            )  # fmt: skip
    said = "; ".join(f"{short(v)} is stored as {element.bits(c)} and comes back as {short(d)}"
                     for v, c, d in zip(block.values, block.codes, block.decoded, strict=True))  # fmt: skip
    alt = f"The scale is {short(block.scale)}, bits {kind.scale.bits(block.scale_code)}. {said}."
    return Drawing(name, title, figure, alt, block.table())


@styled
def value_grid(number: NumberFormat = E2M1, title: str = "", name: str = "value-grid") -> Drawing:
    """The values of the positive half of a format, with bits where they fit, and which way each tie is rounded."""
    values, few = number.magnitudes, len(number.magnitudes) <= 16
    title = title or f"The {len(values)} values of {number.name} from 0 to {short(number.largest)}"
    note = "dots: values. Arrows: halfway points go to the even code" if few else "each line is a value"
    figure, ax = new_figure(7.8, 2.3 if few else 1.7, title, note)
    ax.set(ylim=(-0.9, 1.0), yticks=[])
    ax.spines["left"].set_visible(False)
    if few:
        ax.axhline(0, color=RULE)
        ax.plot(values, [0] * len(values), "o", color=LESS, markersize=9)
        for code, value in enumerate(values):
            ax.text(value, 0.28, number.bits(code), ha="center", family="monospace", fontsize=8, rotation=60)
        for tie, goes in number.ties():
            arrow = {"arrowstyle": "-|>", "color": MORE, "connectionstyle": f"arc3,rad={0.5 if goes < tie else -0.5}"}
            ax.annotate("", (goes, -0.08), (tie, -0.12), arrowprops=arrow | {"shrinkA": 0, "shrinkB": 4})
            ax.plot([tie], [-0.12], "|", color=MORE, markersize=8)
            ax.text(tie, -0.75, short(tie), ha="center", fontsize=8, color=MORE)
        ax.set_xticks(values, [short(v) for v in values])
        alt = f"Values of {number.name}: {', '.join(map(short, values))}. " + " ".join(
            f"{short(tie)} is rounded to {short(goes)}." for tie, goes in number.ties()
        )
    else:
        ax.vlines(values, -0.6, 0.8, color=LESS, linewidth=0.6)
        ax.set_xlabel("value")
        alt = (
            f"{len(values)} values of {number.name} from 0 to {short(number.largest)}, dense near zero: half of them "
            f"lie below {short(values[len(values) // 2])}."
        )
    rows = [{"bits": number.bits(code), "value": value} for code, value in enumerate(values)]
    return Drawing(name, title, figure, alt, rows)
