"""The command line: `flashsim COMMAND ...`, the same as `python -m flashsim`.

Every command prints a table for people, one JSON document with `--json`, or CSV with `--csv`. Bad input gets one line
on stderr that names the field, its value and what is accepted, and exit code 2.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from flashsim import __version__
from flashsim.config import ALIASES, PRESETS, Config, load_config, preset_name
from flashsim.reading import shorten
from flashsim.units import number, number_of_bytes, parse_context, plain

DEFAULT_CONTEXT = "1M"


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


class Result:
    """What a command has to say, in three forms: text for people, one JSON document, rows for CSV."""

    def __init__(
        self, text: str, document: Any, rows: Iterable[Mapping[str, Any]], notes: Iterable[str] = (), code: int = 0
    ):
        self.text, self.document, self.rows = text, document, list(rows)
        self.notes, self.code = list(notes), code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 where `verify` finds a claim that does not hold, 2 for bad
    input.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a letter shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(_model_first(sys.argv[1:] if arguments is None else arguments))
    try:
        result = options.run(options)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"flashsim {options.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"flashsim {options.command}: stopped", file=sys.stderr)
        return 130
    for note in dict.fromkeys(result.notes):
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        text = json.dumps(result.document, indent=2, allow_nan=False)
    elif options.csv:
        text = _csv(result.rows)
    else:
        text = result.text
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"flashsim {options.command}: error: stdout cannot be written to ({error.strerror})", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    return result.code


# --- the commands -----------------------------------------------------------------------------------------------------


def _models(options: argparse.Namespace) -> Result:
    from flashsim.kv_cache import kv_bytes_per_token
    from flashsim.params import parameters

    rows = []
    for preset in PRESETS:
        config = load_config(preset)
        rows.append(
            {
                "model": preset,
                "model_type": config.model_type,
                "layers": config.num_hidden_layers,
                "max_position_embeddings": config.max_position_embeddings,
                "parameters": parameters(config).total_parameters(),
                "per_token_bytes": plain(kv_bytes_per_token(config)),
                "aliases": [alias for alias, name in ALIASES.items() if name == preset],
            }
        )
    flat = [row | {"aliases": " ".join(row["aliases"])} for row in rows]
    text = (
        _table(flat) + "\nMODEL is one of these, also as DeepSeek-V3 or deepseek-ai/DeepSeek-V3, an alias, or the path"
    )
    text += " of a config.json or of its folder."
    return Result(text, {"models": rows}, flat)


def _kv(options: argparse.Namespace) -> Result:
    from flashsim.formats import Layout
    from flashsim.kv_cache import kv_cache, kv_reserved
    from flashsim.traffic import decode_read

    config = load_config(options.model)
    contexts = _contexts(options, config)
    how = {"layout": options.layout, "tensor_parallel": options.tensor_parallel}
    report, reserved = kv_cache(config, contexts, **how), kv_reserved(config, contexts, **how)
    read = decode_read(config, contexts, **how).total()
    listed = not report.single
    documents = report.to_json()
    each = documents["reports"] if listed else [documents]
    for i, document in enumerate(each):
        document["reserved_bytes"] = reserved.total()[i] if listed else reserved.total()
        document["read_bytes_per_step"] = read[i] if listed else read
        document |= {"layout": str(Layout.of(options.layout)), "tensor_parallel": options.tensor_parallel}
        if options.by:
            sums = report.by(options.by)
            document["by"] = {_key(key): plain(value[i] if listed else value) for key, value in sums.items()}
    lines = [_sums(report, options.by) if options.by else str(report), ""]
    lines.append(f"per token   {number(report.per_token_bytes())} bytes of global KV")
    filling = sum(row.bytes_per_record for row in report.rows if row.tier == "window")
    if filling:
        lines[-1] += f", and {number(filling)} bytes of windows until they are full"
    for document in each:
        lines.append(f"at {document['context']:,} tokens, one sequence:")
        for tier in ("global", "window", "state", "total"):
            lines.append(f"  {tier:8}  {number_of_bytes(document[f'{tier}_bytes'])}")
        lines.append(f"  reserved  {number_of_bytes(document['reserved_bytes'])} in whole pages, rings and buffers")
        lines.append(f"  read      {number_of_bytes(document['read_bytes_per_step'])} of cache by one decode step")
    rows = _sum_rows(report, options.by) if options.by else report.table()
    return Result("\n".join(lines), documents, rows, report.notes)


def _flops(options: argparse.Namespace) -> Result:
    from flashsim.flops import decode_flops, prefill_flops, prefill_flops_per_token

    config = load_config(options.model)
    contexts = _contexts(options, config)
    precision = dict(_pair(item, "precision") for item in options.precision or ())
    weights = {
        name: _real(value, f"weight of {name}") for name, value in (_pair(w, "weight") for w in options.weight or ())
    }
    report = (prefill_flops if options.prefill else decode_flops)(config, contexts, precision=precision)
    report = report.with_weights(weights)
    document = report.to_json()
    document["phase"] = "prefill" if options.prefill else "decode"
    lines = [_sums(report, options.by) if options.by else str(report), ""]
    if options.prefill:
        per_token = prefill_flops_per_token(config, contexts, precision=precision).to_json(weights)
        document["raw_flops_per_prompt_token"] = per_token["raw_flops"]
        document["weighted_flops_per_prompt_token"] = per_token["weighted_flops"]
    if options.by:
        sums = report.by(options.by)
        document["by"] = {_key(k): [plain(x) for x in (v if isinstance(v, list) else [v])] for k, v in sums.items()}
    what = "the prompt" if options.prefill else "one decode step"
    for i, context in enumerate(document["contexts"]):
        raw, weighted = document["raw_flops"][i], document["weighted_flops"][i]
        lines.append(f"N = {context:,}: {what} {number(raw)} FLOPs, weighted {number(weighted)} ({_giga(weighted)})")
        if options.prefill:
            one = document["weighted_flops_per_prompt_token"][i]
            lines.append(f"    a prompt token at position N, outside the tail: weighted {number(one)} ({_giga(one)})")
    rows = _sum_rows(report, options.by) if options.by else report.table()
    return Result("\n".join(lines), document, rows, report.notes)


def _params(options: argparse.Namespace) -> Result:
    from flashsim.params import parameters

    report = parameters(load_config(options.model))
    rows = [{"model": report.model, "component": k, "parameters": v} for k, v in report.by("component").items()]
    return Result(f"{_table(rows)}\n\n{_after(str(report), 'total:')}", report.to_json(), rows)


def _compare(options: argparse.Namespace) -> Result:
    from flashsim.flops import decode_flops
    from flashsim.kv_cache import kv_cache
    from flashsim.params import parameters
    from flashsim.traffic import decode_read

    contexts, rows, notes = [parse_context(text) for text in options.context or [DEFAULT_CONTEXT]], [], []
    for model in options.models:
        config = load_config(model)
        stored, flops, read = (f(config, contexts) for f in (kv_cache, decode_flops, decode_read))
        params = parameters(config)
        notes += flops.notes
        for i, context in enumerate(contexts):
            rows.append(
                {
                    "model": config.name,
                    "context": context,
                    "per_token_bytes": plain(stored.per_token_bytes()),
                    "global_bytes": stored.tier_bytes("global")[i],
                    "window_bytes": stored.tier_bytes("window")[i],
                    "state_bytes": stored.tier_bytes("state")[i],
                    "total_bytes": stored.total()[i],
                    "read_bytes_per_step": read.total()[i],
                    "decode_raw_flops": plain(flops.total()[i]),
                    "decode_weighted_flops": plain(flops.weighted_total()[i]),
                    "parameters": params.total_parameters(),
                    "active_parameters": params.active(),
                }
            )
    return Result(_sideways(rows), {"models": rows}, rows, notes)


def _ladder(options: argparse.Namespace) -> Result:
    from flashsim.ladder import ladder

    rungs = ladder()
    rows = [
        {
            "step": i,
            "change": rung.change,
            "mechanism": rung.mechanism,
            "released": rung.released or "",
            "per_token_bytes": plain(rung.per_token_bytes),
            "change_bytes": plain(rung.change_bytes),
        }
        for i, rung in enumerate(rungs)
    ]
    ratio = Fraction(rungs[0].per_token_bytes) / Fraction(rungs[-1].per_token_bytes)
    text = _table(rows, signed=("change_bytes",))
    first, last = number(rungs[0].per_token_bytes), number(rungs[-1].per_token_bytes)
    text += f"\n{first} / {last} = {float(ratio):.1f} times smaller."
    text += "\nSteps without a released model are configs made to show one change at a time; their order is a choice."
    return Result(text, {"ladder": rows, "ratio": plain(ratio)}, rows)


def _figures(options: argparse.Namespace) -> Result:
    from flashsim.figures import draw

    paths = [str(path) for path in draw(options.only, options.out)]
    rows = [{"path": path} for path in paths]
    names = sorted({os.path.splitext(os.path.basename(path))[0] for path in paths})
    kinds = sorted({os.path.splitext(path)[1] for path in paths})
    text = f"{len(paths)} files in {options.out}: {', '.join(names)}, each as {' '.join(kinds)}"
    return Result(text, {"written": paths}, rows)


def _verify(options: argparse.Namespace) -> Result:
    from flashsim.claims import VERDICTS, check_claims, residual_text, value_text

    claims = check_claims()
    rows = [claim.to_dict() for claim in claims]
    failed = [claim for claim in claims if not claim.holds]
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    shown = [
        {
            "claim": claim.id,
            "published": value_text(claim.published),
            "computed": value_text(claim.computed),
            "residual": residual_text(claim),
            "verdict": claim.verdict + ("" if claim.holds else f"  EXPECTED {claim.expected}"),
        }
        for claim in claims
        if claim.computed is not None or not claim.holds
    ]
    summary = f"{len(claims)} published numbers: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + "."
    nothing = sum(claim.computed is None for claim in claims)
    summary += (
        f"\n{nothing} of them have nothing to compute (prices, scores, policies, inputs) and are listed by --json."
    )
    summary += (
        "\nEvery verdict is the expected one."
        if not failed
        else f"\nWORSE than expected: {', '.join(claim.id for claim in failed)}"
    )
    text = f"{_table(shown)}\n\n{summary}"
    document = {"claims": rows, "verdicts": counts, "holds": not failed}
    if options.out:
        document["written"] = _write_claims(options.out, claims, rows, summary)
        rough = [row for row in shown if row["verdict"] not in VERDICTS[:2]]
        text = f"{_table(rough)}\n\n{summary}\nAll of them: {' '.join(document['written'])}"
    return Result(text, document, rows, code=1 if failed else 0)


def _write_claims(out: str, claims: Sequence[Any], rows: Sequence[Mapping[str, Any]], summary: str) -> list[str]:
    from flashsim.claims import residual_text, value_text
    from flashsim.paths import write_files

    head = "| claim | published | computed | residual | verdict | how | source |"
    rule = "| --- | ---: | ---: | ---: | --- | --- | --- |"
    lines = [
        f"| {c.id} | {value_text(c.published)} {c.unit} | {value_text(c.computed)} | {residual_text(c)} "
        f"| {c.verdict} | {c.how} | {c.source} |"
        for c in claims
    ]
    markdown = "\n".join(["# Published numbers, recomputed", "", summary, "", head, rule, *lines, ""])
    return [
        str(path)
        for path in write_files(out, {"claims.md": markdown.encode(), "claims.csv": f"{_csv(rows)}\n".encode()})
    ]


def _capacity(options: argparse.Namespace) -> Result:
    from flashsim.budget import Fleet, capacity

    mix: dict[str, Fraction] = {}
    for item in options.mix or ["128Ki"]:
        context, _, share = item.partition("=")
        mix[context] = mix.get(context, Fraction(0)) + _real(share or "1", "mix")
    weights = None if options.weights_gb is None else int(_real(options.weights_gb, "weights-gb") * 10**9)
    free = _real(options.kept_free, "kept-free")
    fleet = Fleet(options.device, options.gpus, options.tensor_parallel, weights, free, options.layout)
    fit = capacity(options.model, fleet, mix)
    rows = [row | {"value": plain(row["value"])} for row in fit.rows()]
    document = {"model": fit.config.name, "device": fleet.device.key, "gpus": fleet.gpus, "limit": fit.limit}
    return Result(str(fit), document | {"rows": rows}, rows)


def _search(options: argparse.Namespace) -> Result:
    from flashsim.budget import OBJECTIVES, Constraints, search

    objectives = tuple(options.objectives or list(OBJECTIVES)[:2])
    found = search(_real(options.bytes, "bytes"), Constraints(context=options.context), objectives=objectives)
    rows = [{key: plain(value) for key, value in point.row().items()} for point in found.front]
    text = f"{found.tried} variants of V4.1-Flash, {len(found.points)} within {options.bytes} bytes a token, "
    text += f"{len(found.front)} that no other beats in {' and '.join(objectives)}. Quality is not known here."
    return Result(f"{_table(rows)}\n\n{text}", {"tried": found.tried, "within": len(found.points), "front": rows}, rows)


# --- arguments --------------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(prog="flashsim", description="KV-cache bytes and decode FLOPs of every DeepSeek generation.")
    parser.add_argument("--version", action="version", version=f"flashsim {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run, about: str, *, model: bool = False) -> argparse.ArgumentParser:
        each = commands.add_parser(name, help=about, description=about)
        each.set_defaults(run=run)
        form = each.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
        form.add_argument("--csv", action="store_true", help="comma-separated rows with a header")
        if model:
            each.add_argument("model", metavar="MODEL", help="a preset, an alias or the path of a config.json")
        return each

    def context(each: argparse.ArgumentParser) -> None:
        text = "tokens, such as 4096, 4Ki, 128Ki, 1M (10^6) or 1Mi (2^20), one or several"
        text += f" (default {DEFAULT_CONTEXT}, or max_position_embeddings if that is less)"
        each.add_argument("--context", "-N", nargs="+", action="extend", metavar="N", help=text)

    command("models", _models, "the released models that are shipped")

    kv = command("kv", _kv, "KV-cache bytes stored, with their derivation", model=True)
    context(kv)
    kv.add_argument("--by", choices=("component", "layer", "tier"), help="sums instead of the derivation")
    layout = "another record layout: bf16, mxfp8, v4, fp8-indexer, or main=NAME,index=NAME,window=NAME"
    kv.add_argument("--layout", default="released", metavar="LAYOUT", help=layout)
    tensor = "the share of one of K ranks: GQA divides its KV heads, latents and indexer keys replicate"
    kv.add_argument("--tensor-parallel", "--tp", type=_whole, default=1, metavar="K", help=tensor)

    flops = command("flops", _flops, "FLOPs of one decode step, or of a prefill", model=True)
    context(flops)
    flops.add_argument("--by", choices=("component", "layer", "precision"), help="sums instead of the derivation")
    flops.add_argument("--prefill", action="store_true", help="a whole prompt of N tokens instead of one decode step")
    flops.add_argument("--weight", action="append", metavar="PRECISION=W", help="another weight, such as fp4=0.5")
    flops.add_argument("--precision", action="append", metavar="COMPONENT=P", help="such as routed_experts=fp4")

    command("params", _params, "parameters, in total and active", model=True)

    compare = command("compare", _compare, "several models side by side")
    compare.add_argument("models", nargs="+", metavar="MODEL", help="presets, aliases or paths of config.json files")
    context(compare)

    fit = command("capacity", _capacity, "how many sequences fit a number of GPUs", model=True)
    fit.add_argument("--device", default="h200-sxm", metavar="KEY", help="a table of data/hardware.toml (h200-sxm)")
    fit.add_argument("--gpus", type=_whole, default=8, metavar="G", help="in all (8)")
    fit.add_argument("--tensor-parallel", "--tp", type=_whole, default=8, metavar="K", help="that share a replica (8)")
    mix = "contexts, with their shares of the sequences: 4Ki=3 128Ki=1 (128Ki alone)"
    fit.add_argument("--mix", nargs="+", action="extend", metavar="N=SHARE", help=mix)
    fit.add_argument("--weights-gb", metavar="GB", help="of one replica, 10^9 bytes; by default those of the release")
    fit.add_argument("--kept-free", default="0.1", metavar="SHARE", help="of each GPU's memory (0.1)")
    fit.add_argument("--layout", default="released", metavar="LAYOUT", help=layout)

    budget = command("search", _search, "variants of V4.1-Flash that store at most so many bytes a token")
    budget.add_argument("bytes", metavar="BYTES", help="a token's budget, such as 890")
    budget.add_argument(
        "--context", default=DEFAULT_CONTEXT, metavar="N", help=f"at which FLOPs count ({DEFAULT_CONTEXT})"
    )
    about = "stored_bytes, decode_flops, window_bytes, kept_numbers (the first two)"
    budget.add_argument("--objectives", nargs="+", action="extend", metavar="NAME", help=about)

    command("ladder", _ladder, "what each change bought on the way from 389,120 bytes a token to 890")

    figures = command("figures", _figures, "draws the figures: SVG, PNG, the CSV they were drawn from, alt text")
    figures.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="these figures alone")
    figures.add_argument("--out", default="out", metavar="DIR", help="the folder to write into (default out)")

    verify = command("verify", _verify, "recomputes every published number; exits with 1 if one no longer holds")
    verify.add_argument("--out", metavar="DIR", help="also writes claims.md and claims.csv into this folder")
    return parser


def _contexts(options: argparse.Namespace, config: Config) -> int | list[int]:
    """The contexts asked for; without any, 10^6 tokens, or the longest that the model was made for if that is less."""
    if not options.context:
        return min(parse_context(DEFAULT_CONTEXT), config.max_position_embeddings)
    contexts = [parse_context(text) for text in options.context]
    return contexts if len(contexts) > 1 else contexts[0]


def _key(key: Any) -> str:
    return "whole model" if key is None else str(key)


def _model_first(arguments: Sequence[str]) -> list[str]:
    """`kv --context 4Ki v3` as `kv v3 --context 4Ki`: words at the end that are no context are models."""
    arguments = list(arguments)
    models = []
    if {"--context", "-N"} & set(arguments) and arguments[0] in ("kv", "flops", "compare"):
        while len(arguments) > 2 and not arguments[-1].startswith("-") and not arguments[-2].startswith("-"):
            try:
                parse_context(arguments[-1])
                break
            except ValueError:
                if preset_name(arguments[-1]) is None and not os.path.exists(arguments[-1]):
                    break
                models.insert(0, arguments.pop())
    return arguments[:1] + models + arguments[1:]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a whole number of ranks") from None


def _pair(item: str, what: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise ValueError(f"{what} is {item!r}; accepted: NAME=VALUE")
    return name.strip(), value.strip()


def _real(text: str, what: str) -> Fraction:
    try:
        if len(text) > 20 or "e" in text.lower():
            raise ValueError
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{what} is {shorten(text)}; accepted: a number such as 0.5 or 1/4") from None


# --- text -------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Mapping[str, Any]], signed: Sequence[str] = ()) -> str:
    """Columns aligned for a terminal: numbers to the right, words to the left."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[_cell(row[name], name in signed) for name in names] for row in rows]
    right = [all(_is_number(row[name]) for row in rows) for name in names]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    lines = []
    for line in [names, ["-" * width for width in widths], *cells]:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _sideways(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same with one column for each row, for a few rows of many numbers."""
    names = list(rows[0])
    head, rest = names[0], names[1:]
    columns = [str(row[head]) for row in rows]
    cells = [[name, *(_cell(row[name]) for row in rows)] for name in rest]
    widths = [max(len(line[i]) for line in [[head, *columns], *cells]) for i in range(len(rows) + 1)]
    lines = [[head, *columns], ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cell(value: Any, signed: bool = False) -> str:
    if value is None:
        return ""
    if not _is_number(value):
        return str(value)
    return ("+" if signed and value > 0 else "") + number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool)


def _sum_rows(report: Any, by: str) -> list[dict[str, Any]]:
    rows = []
    for key, values in report.by(by).items():
        values = [values] if report.single else values
        for context, value in zip(report.contexts, values, strict=True):
            rows.append(
                {"model": report.model, "context": context, by: _key(key), "value": plain(value), "unit": report.unit}
            )
    return rows


def _sums(report: Any, by: str) -> str:
    """A table of sums, one column for each context."""
    total = report.total()
    rows = []
    for key, values in [*report.by(by).items(), ("total", total)]:
        values = [values] if report.single else values
        name = _key(key)
        cells = {f"N = {c:,}": plain(v) for c, v in zip(report.contexts, values, strict=True)}
        rows.append({by: str(name), **cells})
    return f"{report.title}, {report.unit}\n{_table(rows)}"


def _giga(value: int | float) -> str:
    return f"{value / 10**9:,.4g} GFLOPs" if value < 10**13 else f"{value / 10**12:,.4g} TFLOPs"


def _after(text: str, marker: str) -> str:
    return text[text.rindex(f"\n{marker}") + 1 :]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return buffer.getvalue().rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
