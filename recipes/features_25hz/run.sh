#!/usr/bin/env bash
# Feature matrices with about as many labels as frames: a linear front end compared with a subsampling by 4.
#   recipes/features_25hz/run.sh [--out exp/features_25hz] [--stage 1] [--stop-stage 4] [option=value ...]
# Needs no data. Options of asr.train may follow. The same command, without --stage, continues an interrupted run.
set -euo pipefail
# shellcheck source=../stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
parse "" exp/features_25hz 4 "$@"

if begin 1 "3,000 generated utterances, and 500 for the test"; then
  python "$(dirname "${BASH_SOURCE[0]}")/make.py" --out "$out/data"
  finish
fi

fit() { # FOLDER [OPTION...]
  train "$1" features_25hz "$(joined "$out/data/train")" "$(joined "$out/data/dev")" "${@:2}"
}

if begin 2 "training with the linear front end (conf/experiment/features_25hz.yaml says how long)"; then
  fit "$out/linear"
  finish
fi

if begin 3 "training with a subsampling by 4, too few frames for CTC; and with the linear one without CTC"; then
  alone=(model.ctc=false validation.ctc_weight=0)
  fit "$out/by4" "${alone[@]}" model.subsampler=conv2d model.subsampling=4 model.tokens_per_frame=8
  fit "$out/linear_without_ctc" "${alone[@]}"
  finish
fi

if begin 4 "test: errors by label"; then
  for front_end in linear by4 linear_without_ctc; do
    errors=$(python -m asr.evaluate "$out/data/test" --model "$out/$front_end/model" | sed -n 's/^CER //p')
    echo "$front_end: $errors"
  done | tee "$out/RESULTS.md"
  finish
fi
