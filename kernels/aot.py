"""Compile the kernels for GPUs that are not here: python -m kernels.aot [MODULE ...] [--arch 80 90 100]

A kernel module takes part by defining

    def aot_cases():
        return [(name, jitted function, signature, constexprs, options, expected), ...]

    signature    argument -> type, as in {"x_ptr": "*bf16", "rows": "i32", "stride": "i32:16"}; ":16" says divisible by
                 16, which pointers are assumed to be anyway
    constexprs   argument -> value: tl.constexpr arguments, and those the launcher specialises (None, 1)
    options      {"num_warps": 8, "num_stages": 3}
    expected     None, or {arch: substrings of the PTX}: None compiles for every architecture and looks for nothing; an
                 architecture left out of the dictionary is not compiled (E4M3 types do not exist on sm_80); a
                 substring behind "!" must not be there

No GPU and no driver is needed, but a process without TRITON_INTERPRET. Prints one JSON object a line:
{"module", "case", "arch", "shared" (bytes a program), "missing" (substrings not as expected), "seconds"}, or "error".
Test: tests/kernels/test_compile.py.
"""

import argparse
import importlib
import json
import pathlib
import sys
import time

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = 227 * 1024  # bytes a program may use on sm_90


def compile_case(fn, signature, constexprs, options, arch):
    """The compiled kernel of one case: `.asm["ptx"]`, `.metadata.shared`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, attributes = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constexprs:
            types[name] = "constexpr"
            continue
        kind, _, divisor = signature[name].partition(":")
        types[name] = kind
        if kind.startswith("*") or divisor:
            attributes[(i,)] = [["tt.divisibility", int(divisor or 16)]]
    values = {(fn.arg_names.index(name),): value for name, value in constexprs.items()}
    source = ASTSource(fn=fn, signature=types, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))


def module_names():
    """Kernel modules that define aot_cases, found by their text so that nothing has to be imported."""
    folder = pathlib.Path(__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if p.stem != "aot" and "\ndef aot_cases(" in p.read_text())


def reports(names, architectures=ARCHITECTURES):
    """One report a case and architecture."""
    for name in names:
        for case, fn, signature, constexprs, options, expected in importlib.import_module(
            f"kernels.{name}"
        ).aot_cases():
            for arch in architectures:
                if expected is not None and arch not in expected:
                    continue
                report = {"module": name, "case": case, "arch": arch}
                start = time.time()
                try:
                    kernel = compile_case(fn, signature, constexprs, options, arch)
                    wanted = expected[arch] if expected else ()
                    report["shared"] = kernel.metadata.shared
                    report["missing"] = [text for text in wanted or () if not _found(text, kernel.asm["ptx"])]
                except Exception as error:
                    report["error"] = f"{type(error).__name__}: {str(error)[:500]}"
                yield report | {"seconds": round(time.time() - start, 1)}


def _found(text, ptx):
    return text[1:] not in ptx if text.startswith("!") else text in ptx


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description="compile the kernels without a GPU")
    parser.add_argument("modules", nargs="*", help="kernel modules, all by default")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    options = parser.parse_args(arguments)
    failed = False
    for report in reports(options.modules or module_names(), options.arch):
        print(json.dumps(report), flush=True)
        failed |= bool(report.get("error") or report.get("missing"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
