#!/usr/bin/env bash
# English number words to French ones, 0 to 999,999: text in, text out, with the same Transformer, trainer and search.
#   recipes/translate_numbers/run.sh [--out exp/translate_numbers] [--stage 1] [--stop-stage 3] [option=value ...]
# Needs no data. Options of asr.train may follow. The same command, without --stage, continues an interrupted run.
set -euo pipefail
# shellcheck source=../stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
parse "" exp/translate_numbers 3 "$@"

if begin 1 "20,000 numbers, and 5,000 others for the test"; then
  python "$(dirname "${BASH_SOURCE[0]}")/make.py" --out "$out/data"
  finish
fi

if begin 2 "training (conf/experiment/translate_numbers.yaml says how long)"; then
  train "$out" translate_numbers "$(joined "$out/data/train.jsonl")" "$(joined "$out/data/dev.jsonl")"
  finish
fi

if begin 3 "test: WER, CER and how many numbers are not wholly right (SER)"; then
  python -m asr.evaluate "$out/data/test.jsonl" --model "$out/model" | tee "$out/RESULTS.md"
  finish
fi
