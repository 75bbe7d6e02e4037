#!/usr/bin/env bash
# The English model that ships: from a folder of corpora to a model folder and a WER table.
#   recipes/english/run.sh --speech DIR [--out exp/english] [--stage 1] [--stop-stage 4] [option=value ...]
# DIR holds *.train.tar, *.dev.tar and perhaps *.test.tar (a manifest.jsonl and its audio in each).
# Options of asr.train may follow. A run that was interrupted goes on with the stage that it was in.
set -euo pipefail
# shellcheck source=recipes/stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
parse --speech exp/english 4 "$@"

if begin 1 cuts; then
  for part in train dev; do
    compgen -G "$data/*.$part.tar" > /dev/null || wrong "--speech '$data' holds no *.$part.tar"
  done
  for tar in "$data"/*.tar; do
    name=$(basename "$tar" .tar)
    python -m asr.corpus prepare "$tar" --wav "$cuts/wav/$name" --out "$cuts/$name.jsonl.gz"
  done
  for dev in "$cuts"/*.dev.jsonl.gz; do # a few utterances of each tell the checkpoints apart, and choose the decoding
    python -m asr.corpus sample "$dev" --utterances 75 --out "${dev/%.dev.jsonl.gz/.some.jsonl.gz}"
  done
  finish
fi

if begin 2 "training (conf/experiment/english.yaml says how long)"; then
  train english "$(joined "$cuts"/*.train.jsonl.gz)" "$(joined "$cuts"/*.some.jsonl.gz)"
  finish
fi

if begin 3 "weights of decoding, confidences"; then
  python -m asr.tune "$cuts"/*.some.jsonl.gz --model "$out/model" --ctc-weights 0.3 0.5 --length-bonuses 0 0.3 --write
  finish
fi

if begin 4 WER; then
  {
    echo "| set | WER, errors |"
    echo "| --- | --- |"
    for set in "$cuts"/*.dev.jsonl.gz "$cuts"/*.test.jsonl.gz; do
      [ -e "$set" ] || continue
      errors=$(wer "$set")
      echo "| $(basename "$set" .jsonl.gz) | $errors |"
    done
  } | tee "$out/RESULTS.md"
  finish
fi
