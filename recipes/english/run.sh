#!/usr/bin/env bash
# The English model that ships: from a folder of corpora to a model folder and a WER table.
#   recipes/english/run.sh --speech DIR [--text FILE] [--out exp/english] [--stage 1] [--stop-stage 5] [option=value ...]
# DIR holds *.train.tar, *.dev.tar and perhaps *.test.tar (a manifest.jsonl and its audio in each); FILE is text for a
# language model, a sentence a line (.xz, .gz or plain).
# Options of asr.train may follow. A run that was interrupted goes on with the stage that it was in.
set -euo pipefail
# shellcheck source=recipes/stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
parse "--speech --text" exp/english 5 "$@"

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

if [ -n "$text" ] && begin 3 "language model"; then
  language_model "$text"
  finish
fi

if begin 4 "weights of decoding, confidences"; then
  fused=()
  [ ! -d "$out/lm/model" ] || fused=(--lm "$out/lm/model" --lm-weights 0.3 0.5 --beam-size 5)
  python -m asr.tune "$cuts"/*.some.jsonl.gz --model "$out/model" --ctc-weights 0.3 0.5 --length-bonuses 0 0.5 \
    ${fused[@]+"${fused[@]}"} --write
  finish
fi

if begin 5 WER; then
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
