"""Block formats, and the cached records built from them. A record's bytes are computed from its parts.

| record | bytes | parts |
| --- | ---: | --- |
| MLA latent, BF16 (V2, V3) | 1,152 | 512 + 64 BF16 |
| MLA latent, FP8 (V3.2) | 656 | 512 FP8, one FP32 scale per 128; 64 BF16 RoPE |
| V4 entry and window | 584 | 448 FP8, one UE8M0 scale per 64, scales padded to 8 bytes; 64 BF16 RoPE |
| V4.1 window | 528 | 512 FP8, one UE8M0 scale per 32 |
| V4.1 main entry | 288 | 512 FP4 (E2M1), one E4M3 scale per 16 |
| indexer key, FP8 (V3.2) | 132 | 128 FP8, one FP32 scale per 128 |
| indexer key, MXFP4 (V4, V4.1) | 68 | 128 FP4, one UE8M0 scale per 32 |

Sources: FlashMLA README and pull request 221; vLLM pull requests 48993 and 56893.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction


class LayoutError(ValueError):
    """A record layout that does not exist, or does not fit the width it is asked to hold."""


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of `element_bits`, of which every `block_size` share one scale of `scale_bits`.

    `scale_alignment` pads all scales of one vector to a multiple of so many bytes. `block_size` None means no scales.
    """

    name: str
    element_bits: int
    scale_bits: int = 0
    block_size: int | None = None
    scale_alignment: int = 1

    def scales(self, width: int) -> int:
        """How many scales a vector of `width` elements carries. A vector shorter than a block is one block.

        Raises:
            LayoutError: the width is neither under one block nor a multiple of it.
        """
        if self.block_size is None or width == 0:
            return 0
        if width > self.block_size and width % self.block_size:
            raise LayoutError(
                f"a vector of {width} in {self.name}; accepted: multiples of its block of {self.block_size}"
            )
        return max(width // self.block_size, 1)

    def nbytes(self, width: int) -> int:
        """Bytes of one vector of `width` elements: packed elements, then scales with their padding.

        >>> MXFP4.nbytes(128), FP4.nbytes(512), MXFP8.nbytes(512), FP8_UE8M0_64.nbytes(448)
        (68, 288, 528, 456)
        """
        elements = Fraction(width * self.element_bits, 8)
        if elements.denominator != 1:
            raise LayoutError(f"a vector of {width} in {self.name}; accepted: widths that fill whole bytes")
        scales = -(-self.scales(width) * self.scale_bits // 8)
        return int(elements) + -(-scales // self.scale_alignment) * self.scale_alignment

    def describe(self, width: int) -> str:
        """`512 FP4 (256) + 32 E4M3 scales (32)`: the parts with their bytes."""
        text = f"{width} {self.name.split()[0]} ({number_of_element_bytes(width, self.element_bits)})"
        if scales := self.scales(width):
            rest = self.nbytes(width) - width * self.element_bits // 8
            pad = rest - scales * self.scale_bits // 8
            text += f" + {scales} {self.name.split()[1]} scale{'s' * (scales > 1)}"
            text += f" and {pad} pad byte{'s' * (pad > 1)}" if pad else ""
            text += f" ({rest})"
        return text


def number_of_element_bytes(width: int, bits: int) -> int:
    """Bytes of `width` packed elements of `bits` bits, without scales."""
    return width * bits // 8


# The first word names the elements, the second the scales.
BF16 = BlockFormat("BF16", 16)
FP32 = BlockFormat("FP32", 32)
FP8_PLAIN = BlockFormat("FP8", 8)  # one scale for the whole tensor: nothing in the record
BITS6 = BlockFormat("6-bit", 6)  # DeepSeek-V2's service: about 6 bits an element
FP8 = BlockFormat("FP8 FP32", 8, 32, 128)
FP8_UE8M0_64 = BlockFormat("FP8 UE8M0", 8, 8, 64, scale_alignment=8)
MXFP8 = BlockFormat("FP8 UE8M0", 8, 8, 32)
MXFP4 = BlockFormat("FP4 UE8M0", 4, 8, 32)
FP4 = BlockFormat("FP4 E4M3", 4, 8, 16)


@dataclass(frozen=True)
class Record:
    """One cached record: vectors of given widths, each in its block format."""

    parts: tuple[tuple[int, BlockFormat], ...]
    field: str = "width"

    @property
    def nbytes(self) -> int:
        """Bytes of the record, an exact integer.

        Raises:
            LayoutError: naming the config field whose width does not fit its format.
        """
        try:
            return sum(form.nbytes(width) for width, form in self.parts)
        except LayoutError as error:
            total = sum(width for width, _ in self.parts)
            raise LayoutError(f"{self.field} is {total} channels in all: {error}") from None

    @property
    def precision(self) -> str:
        """The element formats, `fp8+bf16` for a record with a BF16 tail."""
        return "+".join(dict.fromkeys(form.name.split()[0].lower() for width, form in self.parts if width))

    def describe(self) -> str:
        """The parts with their bytes, `448 FP8 (448) + 7 UE8M0 scales and 1 pad byte (8) + 64 BF16 (128)`.

        >>> Record(((448, FP8_UE8M0_64), (64, BF16))).describe()
        '448 FP8 (448) + 7 UE8M0 scales and 1 pad byte (8) + 64 BF16 (128)'
        """
        return " + ".join(form.describe(width) for width, form in self.parts if width)


# encoding name -> (format of the channels without RoPE, format of the RoPE channels or None for "the same vector")
ENCODINGS: Mapping[str, tuple[BlockFormat, BlockFormat | None]] = {
    "bf16": (BF16, None),
    "fp8": (FP8, None),  # 132 for a 128-wide indexer key
    "fp8-plain": (FP8_PLAIN, None),
    "fp8+bf16rope": (FP8, BF16),  # 656, V3.2's latent
    "v4": (FP8_UE8M0_64, BF16),  # 584
    "mxfp8": (MXFP8, None),  # 528
    "mxfp4": (MXFP4, None),  # 68 for a 128-wide indexer key
    "fp4": (FP4, None),  # 288
    "6bit": (BITS6, None),
}


@dataclass(frozen=True)
class Layout:
    """Which encoding each kind of record uses; None keeps the released one of the model.

    `main`: the cache that grows with context. `index`: the indexer's keys. `window`: the sliding window.
    """

    main: str | None = None
    index: str | None = None
    window: str | None = None

    def __post_init__(self):
        for field in ("main", "index", "window"):
            name = getattr(self, field)
            if name is not None and not (isinstance(name, str) and name in ENCODINGS):
                raise LayoutError(f"layout {field} is {name!r}; accepted: {', '.join(ENCODINGS)}")

    @staticmethod
    def of(layout: Layout | str | Mapping[str, str] | None) -> Layout:
        """A layout from a text such as `bf16`, `mxfp8`, `mxfp8,index=fp8` or `main=fp4,window=v4`.

        `bf16` alone sets all three kinds, any other bare name sets main and window, `fp8-indexer` and `fp4-indexer`
        set the indexer's keys, `released` sets nothing.

        Raises:
            LayoutError: a name or a kind that does not exist.

        >>> Layout.of("mxfp8,index=fp8")
        Layout(main='mxfp8', index='fp8', window='mxfp8')
        """
        if layout is None or isinstance(layout, Layout):
            return layout or Layout()
        if isinstance(layout, Mapping):
            items = [f"{kind}={name}" for kind, name in layout.items()]
        else:
            items = str(layout).lower().replace(";", ",").split(",")
        result = Layout()
        for item in items:
            kind, equals, name = (part.strip() for part in item.strip().partition("="))
            if not equals:
                changes = {
                    "released": {},
                    "bf16": dict.fromkeys(("main", "index", "window"), "bf16"),
                    "fp8-indexer": {"index": "fp8"},
                    "fp4-indexer": {"index": "mxfp4"},
                }.get(kind, {"main": kind, "window": kind})
                if kind not in ENCODINGS and kind not in ("released", "fp8-indexer", "fp4-indexer"):
                    raise LayoutError(
                        f"layout is {kind!r}; accepted: released, fp8-indexer, fp4-indexer, {', '.join(ENCODINGS)}, "
                        "or main=, index=, window= one of these, joined by commas"
                    )
            elif kind in ("main", "index", "window"):
                changes = {kind: None if name == "released" else name}
            else:
                raise LayoutError(f"layout sets {kind!r}; accepted: main, index, window")
            result = replace(result, **changes)
        return result

    def __str__(self) -> str:
        set_kinds = [(kind, getattr(self, kind)) for kind in ("main", "index", "window")]
        return ",".join(f"{kind}={name}" for kind, name in set_kinds if name is not None) or "released"


def encode(encoding: str, width: int, rope_width: int = 0, field: str = "width") -> Record:
    """The record of a vector of `width` channels, of which the last `rope_width` carry RoPE.

    >>> encode("v4", 512, 64).nbytes, encode("fp8+bf16rope", 576, 64).nbytes, encode("fp4", 512, 64).nbytes
    (584, 656, 288)
    """
    body, rope = ENCODINGS[encoding]
    if rope is None:
        return Record(((width, body),), field)
    return Record(((width - rope_width, body), (rope_width, rope)), field)
