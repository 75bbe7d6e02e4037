#!/usr/bin/env bash
# The English model that ships: from a folder of corpora to a model folder and a WER table.
#   recipes/english/run.sh --speech DIR [--out exp/english] [--stage 1] [--stop-stage 3] [option=value ...]
# DIR holds *.train.tar, *.dev.tar and perhaps *.test.tar (a manifest.jsonl and its audio in each).
# Options of asr.train may follow. A run that was interrupted goes on with the stage that it was in.
set -euo pipefail

speech='' out=exp/english stage=1 stop_stage=3 options=()
while [ $# -gt 0 ]; do
  case $1 in
    --speech) speech=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --stage) stage=$2; shift 2 ;;
    --stop-stage) stop_stage=$2; shift 2 ;;
    *=*) options+=("$1"); shift ;;
    *) echo "run.sh: unknown argument $1; see the head of this file" >&2; exit 2 ;;
  esac
done
cuts=$out/cuts

if [ "$stage" -le 1 ] && [ "$stop_stage" -ge 1 ]; then
  echo "Stage 1: cuts"
  for part in train dev; do
    if ! compgen -G "$speech/*.$part.tar" > /dev/null; then
      echo "run.sh: --speech '$speech' holds no *.$part.tar" >&2; exit 2
    fi
  done
  for tar in "$speech"/*.tar; do
    name=$(basename "$tar" .tar)
    python -m asr.corpus prepare "$tar" --wav "$cuts/wav/$name" --out "$cuts/$name.jsonl.gz"
  done
fi

joined() { local IFS=,; echo "[$*]"; }

if [ "$stage" -le 2 ] && [ "$stop_stage" -ge 2 ]; then
  echo "Stage 2: training (conf/experiment/english.yaml says how long)"
  resume=false
  [ -e "$out/checkpoints/last.ckpt" ] && resume=true
  python -m asr.train experiment=english "data.train=$(joined "$cuts"/*.train.jsonl.gz)" \
    "data.dev=$(joined "$cuts"/*.dev.jsonl.gz)" "out=$out" "resume=$resume" ${options[@]+"${options[@]}"}
fi

if [ "$stage" -le 3 ] && [ "$stop_stage" -ge 3 ]; then
  echo "Stage 3: WER"
  {
    echo "| set | WER, errors |"
    echo "| --- | --- |"
    for set in "$cuts"/*.dev.jsonl.gz "$cuts"/*.test.jsonl.gz; do
      [ -e "$set" ] || continue
      result=$(python -m asr.evaluate "$set" --model "$out/model" | sed -n 1p)
      echo "| $(basename "$set" .jsonl.gz) | ${result#WER } |"
    done
  } | tee "$out/RESULTS.md"
fi
