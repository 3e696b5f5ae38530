"""The fuzz over options: masks, weights, causal, decay, updates, heads, ... in every dtype, against float64 formulas.

    python tests/fuzzing_options.py --count 20000           # values
    python tests/fuzzing_options.py --count 10000 --grad    # gradients
    python tests/fuzzing_options.py --family causal --start 17 --count 1   # one case again

A case counts as wrong when an error is above 1e-3 of the output's scale, beyond the rounding of its dtype, and nothing
was said; that must never happen. Where rounding in float64 decides already, it counts as undecided.
"""

from __future__ import annotations

import argparse
import sys

import torch

from fuzz.run import FAMILIES, Survey


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--grad", action="store_true", help="gradients, too")
    parser.add_argument("--family", choices=tuple(FAMILIES), help="only this one")
    parser.add_argument("--show", type=int, default=40, help="how many failures to list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    families = [args.family] if args.family else list(FAMILIES)
    survey = Survey().run(families, args.count, args.start, args.grad)
    print(survey.report())
    print("\n".join((survey.silent + survey.raised)[: args.show]))
    return 1 if survey.silent or survey.raised or survey.share("float32", "value", 1e-5) < 0.995 else 0


if __name__ == "__main__":
    sys.exit(main())
