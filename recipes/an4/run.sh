#!/usr/bin/env bash
# AN4 from the audio to a WER table: 0.7 h of spelled names, numbers and commands, official test set, nothing else. A
# first model finds the times of the training set's words; a second training also uses these words in ever new orders.
#   recipes/an4/run.sh --data DIR [--out exp/an4] [--stage 1] [--stop-stage 6] [option=value ...]
# DIR is AN4 as unpacked (etc/, wav/), or a folder with an4.train.tar and an4.test.tar (each with a manifest.jsonl).
# Options of asr.train may follow. The same command, without --stage, continues an interrupted run.
set -euo pipefail
# shellcheck source=../stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
data=''
parse data exp/an4 6 "$@"
[ -n "$data" ] || wrong "--data DIR is missing: the folder of AN4"

if begin 1 "cuts of train, dev (5 speakers of train) and test"; then
  if [ -f "$data/etc/an4_train.fileids" ]; then
    train=$data/etc/an4_train.fileids test=$data/etc/an4_test.fileids
  elif [ -f "$data/an4.train.tar" ]; then
    train=$data/an4.train.tar test=$data/an4.test.tar
  else
    wrong "--data '$data' holds neither etc/an4_train.fileids nor an4.train.tar"
  fi
  rm -rf "$cuts/wav"
  python -m asr.corpus prepare "$train" --wav "$cuts/wav/train" --out "$cuts/all.jsonl.gz"
  python -m asr.corpus prepare "$test" --wav "$cuts/wav/test" --out "$cuts/test.jsonl.gz"
  python -m asr.corpus split "$cuts/all.jsonl.gz" --speakers 5 --out "$cuts/dev.jsonl.gz" --rest "$cuts/train.jsonl.gz"
  finish
fi

if begin 2 "training a first model (half an hour of one core)"; then
  train "$out/first" an4 "$(joined "$cuts/train.jsonl.gz")" "$(joined "$cuts/dev.jsonl.gz")"
  finish
fi

if begin 3 "new utterances of the training set's words"; then
  splice "$out/first/model" 8 "$cuts/train.jsonl.gz"
  finish
fi

if begin 4 "training on (conf/experiment/an4_spliced.yaml says how long)"; then
  train "$out" an4_spliced "$(joined "$cuts/train.jsonl.gz" "$cuts/spliced.jsonl.gz")" "$(joined "$cuts/dev.jsonl.gz")" \
    "init_from=$(quoted "$out/first/model")"
  finish
fi

if begin 5 "weights of decoding, chosen on dev"; then
  python -m asr.tune "$cuts/dev.jsonl.gz" --model "$out/model" --ctc-weights 0.3 0.4 0.5 --length-bonuses 0 0.3 0.6 --write
  finish
fi

if begin 6 WER; then
  {
    echo "| set | decoding | WER, errors |"
    echo "| --- | --- | --- |"
    for set in dev test; do
      for decoding in ctc greedy beam; do
        alone=()
        [ $decoding = beam ] || alone=(--length-bonus 0)
        errors=$(wer "$cuts/$set.jsonl.gz" --strategy $decoding ${alone[@]+"${alone[@]}"})
        echo "| $set | $decoding | $errors |"
      done
    done
  } | tee "$out/RESULTS.md"
  finish
fi
