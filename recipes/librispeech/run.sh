#!/usr/bin/env bash
# LibriSpeech from the download to a WER table: 100 h, 960 h, or 5 h (Mini LibriSpeech).
#   recipes/librispeech/run.sh --data DIR [--subset 100|960|mini] [--out exp/librispeech_100] [--stage 1]
#                              [--stop-stage 7] [--text FILE] [option=value ...]
# DIR holds LibriSpeech/train-clean-100 and so on; what is missing is downloaded into it, from OpenSLR or $URL.
# FILE is text for a language model, one sentence per line (.gz, .xz or plain); without it there is no language model.
# Options of asr.train may follow. The same command, without --stage, continues an interrupted run.
set -euo pipefail
# shellcheck source=../stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"

data='' text='' subset=100
parse "data text subset" '' 7 "$@"
[ -z "$text" ] || [ -f "$text" ] || wrong "--text '$text' is no file"
case $subset in
  100) experiment=librispeech_100 train=(train-clean-100) dev=(dev-clean dev-other) test=(test-clean test-other) ;;
  960)
    experiment=librispeech_960 train=(train-clean-100 train-clean-360 train-other-500)
    dev=(dev-clean dev-other) test=(test-clean test-other)
    ;;
  mini) experiment=mini_librispeech train=(train-clean-5) dev=(dev-clean-2) test=() ;;
  *) wrong "--subset is 100, 960 or mini, not '$subset'" ;;
esac
out=${out:-exp/$experiment}
cuts=$out/cuts
[ -n "$data" ] || wrong "--data DIR is missing: the folder of LibriSpeech, or where it shall be"
parts=("${train[@]}" "${dev[@]}" ${test[@]+"${test[@]}"})

if begin 1 "download"; then
  for part in "${parts[@]}"; do
    [ -d "$data/LibriSpeech/$part" ] || python -m asr.corpus download "$part" --out "$data" ${URL:+--url "$URL"}
  done
  finish
fi

if begin 2 "cuts"; then
  for part in "${parts[@]}"; do
    python -m asr.corpus prepare "$data/LibriSpeech/$part" --out "$cuts/$part.jsonl.gz"
  done
  finish
fi

files() {
  local found=() part
  for part in "$@"; do found+=("$cuts/$part.jsonl.gz"); done
  joined "${found[@]}"
}

first=$out
[ "$subset" != mini ] || first=$out/first # so little speech is also spliced, for a second training

if begin 3 "tokenizer, statistics and training (conf/experiment/$experiment.yaml says how long)"; then
  train "$first" "$experiment" "$(files "${train[@]}")" "$(files "${dev[0]}")"
  finish
fi

if [ "$first" != "$out" ] && begin 4 "new utterances of the training speech's words"; then
  splice "$first/model" 8 "$cuts/${train[0]}.jsonl.gz"
  finish
fi

if [ "$first" != "$out" ] && begin 5 "training on (conf/experiment/${experiment}_spliced.yaml says how long)"; then
  train "$out" "${experiment}_spliced" "$(files "${train[@]}" spliced)" "$(files "${dev[0]}")" "init_from=$(quoted "$first/model")"
  finish
fi

if [ -n "$text" ] && begin 6 "language model, and its weight"; then
  shipped=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../data/models/english/lm" && pwd) # trained on books already
  language_model "$text" epochs=1 export=float16 optimizer.lr=1.5e-3 "init_from=$(quoted "$shipped")"
  python -m asr.corpus sample "$cuts/${dev[0]}.jsonl.gz" --utterances 200 --out "$cuts/some.jsonl.gz"
  # the beam is this wide for the language model, whose best weight it doubles
  python -m asr.tune "$cuts/some.jsonl.gz" --model "$out/model" --lm "$out/lm/model" --beam-size 60 --ctc-weight 0.4 \
    --length-bonus 0.5 --lm-weights 0.4 0.8 1.2 --ilm-weights 0 0.4 0.9 --write
  finish
fi

if begin 7 "WER"; then
  {
    echo "| set | WER, errors |"
    echo "| --- | --- |"
    for part in "${dev[@]}" ${test[@]+"${test[@]}"}; do
      errors=$(wer "$cuts/$part.jsonl.gz")
      echo "| $part | $errors |"
    done
    echo
    revision=$(git -C "$(dirname "$0")" rev-parse --short HEAD 2> /dev/null || echo unknown)
    echo "experiment=$experiment ${options[*]-}, revision $revision"
  } | tee "$out/RESULTS.md"
  finish
fi
