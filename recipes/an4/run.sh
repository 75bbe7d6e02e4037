#!/usr/bin/env bash
# AN4 from the audio to a WER table: 0.7 h of spelled names, numbers and commands, official test set, nothing else.
#   recipes/an4/run.sh --data DIR [--out exp/an4] [--stage 1] [--stop-stage 3] [option=value ...]
# DIR is AN4 as it is unpacked (etc/, wav/), or a folder with an4.train.tar and an4.test.tar (a manifest.jsonl in each).
# Options of asr.train may follow. A run that was interrupted goes on with the stage that it was in.
set -euo pipefail

data='' out=exp/an4 stage=1 stop_stage=3 options=()
while [ $# -gt 0 ]; do
  case $1 in
    --data) data=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --stage) stage=$2; shift 2 ;;
    --stop-stage) stop_stage=$2; shift 2 ;;
    *=*) options+=("$1"); shift ;;
    *) echo "run.sh: unknown argument $1; see the head of this file" >&2; exit 2 ;;
  esac
done
cuts=$out/cuts

if [ "$stage" -le 1 ] && [ "$stop_stage" -ge 1 ]; then
  echo "Stage 1: cuts of train, dev (5 speakers of train) and test"
  if [ -f "$data/etc/an4_train.fileids" ]; then
    train=$data/etc/an4_train.fileids test=$data/etc/an4_test.fileids
  elif [ -f "$data/an4.train.tar" ]; then
    train=$data/an4.train.tar test=$data/an4.test.tar
  else
    echo "run.sh: --data '$data' holds neither etc/an4_train.fileids nor an4.train.tar" >&2; exit 2
  fi
  python -m asr.corpus prepare "$train" --wav "$cuts/wav/train" --out "$cuts/all.jsonl.gz"
  python -m asr.corpus prepare "$test" --wav "$cuts/wav/test" --out "$cuts/test.jsonl.gz"
  python -m asr.corpus split "$cuts/all.jsonl.gz" --speakers 5 --out "$cuts/dev.jsonl.gz" --rest "$cuts/train.jsonl.gz"
fi

if [ "$stage" -le 2 ] && [ "$stop_stage" -ge 2 ]; then
  echo "Stage 2: training (conf/experiment/an4.yaml says how long)"
  resume=false
  [ -e "$out/checkpoints/last.ckpt" ] && resume=true
  python -m asr.train experiment=an4 "data.train=[$cuts/train.jsonl.gz]" "data.dev=[$cuts/dev.jsonl.gz]" \
    "out=$out" "resume=$resume" ${options[@]+"${options[@]}"}
fi

if [ "$stage" -le 3 ] && [ "$stop_stage" -ge 3 ]; then
  echo "Stage 3: WER"
  {
    echo "| set | decoding | WER, errors |"
    echo "| --- | --- | --- |"
    for set in dev test; do
      for decoding in "ctc" "greedy" "beam"; do
        result=$(python -m asr.evaluate "$cuts/$set.jsonl.gz" --model "$out/model" --strategy $decoding | sed -n 1p)
        echo "| $set | $decoding | ${result#WER } |"
      done
    done
  } | tee "$out/RESULTS.md"
fi
