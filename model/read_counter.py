"""Bytes of cached records that a real step unpacks, under the component names of `flashsim.decode_read`.

    with ReadCounter(cache) as counter:
        model(ids, cache=cache, last=True)
    print(counter.compare(flashsim.decode_read(model.config, tokens)))

A record that is unpacked is read once, whatever the number of heads that look at it. With one new token in a call of
the `reference` backend the numbers are those of the prediction, but where `REASONS` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flashsim.report import Report
from model.flop_counter import Comparison

REASONS = {"index_key": "every key is unpacked before those of the candidate pool are taken; the formula has the pool"}


class ReadCounter:
    """Counts while it is entered; `nbytes` is a dict of bytes by component."""

    def __init__(self, cache):
        self.codecs = getattr(cache, "codecs", None)
        if self.codecs is None:
            self.codecs = {"main_kv": cache.main_codec, "index_key": cache.key_codec, "window_kv": cache.window_codec}
        self.nbytes: dict[str, int] = {}

    def __enter__(self):
        for component, codec in self.codecs.items():
            codec.unpack = self._counting(component, codec)  # hides the method of its class
        return self

    def __exit__(self, *error):
        for codec in self.codecs.values():
            del codec.unpack

    def _counting(self, component: str, codec):
        unpack = codec.unpack

        def counted(rows: Tensor) -> Tensor:
            query = component == "index_key" and rows.ndim == 4  # [B, S, heads, bytes], rounded like a key, not cached
            if not query:
                records = rows.numel() // rows.shape[-1]
                self.nbytes[component] = self.nbytes.get(component, 0) + records * codec.nbytes
            return unpack(rows)

        return counted

    def compare(self, predicted: Report) -> list[Comparison]:
        """Every component of either side.

        Raises:
            ValueError: two numbers differ for a reason that is not known.
        """
        analytic: Mapping[str, int] = predicted.by("component")
        rows = []
        for component in dict.fromkeys([*analytic, *self.nbytes]):
            counted, expected = self.nbytes.get(component, 0), analytic.get(component, 0)
            reason = None if counted == expected else REASONS.get(component)
            if counted != expected and reason is None:
                raise ValueError(f"{component}: {counted:,} bytes read, {expected:,} predicted")
            rows.append(Comparison(component, counted, expected, reason))
        return rows
