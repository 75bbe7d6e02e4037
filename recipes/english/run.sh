#!/usr/bin/env bash
# The English model that ships: from a folder of corpora to a model folder and a WER table. A first training uses the
# speech as it is; a second one continues from it with a deeper model, as much human speech again, spliced from its
# words, and distortion of it all; further ones continue from the second, each with its own splices, and the weights of
# the second and of these are averaged.
#   recipes/english/run.sh --speech DIR [--text FILE] [--quick N] [--kokoro DIR] [--more N] [--out exp/english]
#                          [--stage 1] [--stop-stage 9] [option=value ...]
# --speech holds corpora of any form, named *.train, *.dev and perhaps *.test: folders (or links to them), tars with a
# manifest.jsonl and its audio (*.train.tar), manifests or cuts (.jsonl, .jsonl.gz). --text is for a language model, in
# addition to the transcripts, one sentence per line (.xz, .gz or plain). For training, hibari and flite speak N of its
# sentences, and Kokoro 8,000, if DIR holds kokoro.onnx and voices/ (recipes/synthesis says where to get all three).
# --more: how many trainings continue from the second, one after another (default: none).
# Options of asr.train may follow. The same command, without --stage, continues an interrupted run.
set -euo pipefail
# shellcheck source=../stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
speech='' text='' kokoro='' quick='' more=0
parse "speech text kokoro quick more" exp/english 9 "$@"
[ -z "$kokoro$quick" ] || [ -n "$text" ] || wrong "--kokoro and --quick speak sentences of --text FILE, which is missing"
[ -z "$text" ] || [ -f "$text" ] || wrong "--text '$text' is no file"
[[ $more =~ ^[0-9]+$ ]] || wrong "--more is a number of trainings"

if begin 1 cuts; then
  corpora train dev
  found+=("$speech"/*.test{,.tar,.jsonl,.jsonl.gz})
  rm -rf "$cuts"/{*.jsonl.gz,wav} # perhaps from other speech
  prepare "${found[@]}"
  for dev in "$cuts"/*.dev.jsonl.gz; do # a few utterances of each select the checkpoints and the decoding
    python -m asr.corpus sample "$dev" --utterances 75 --out "${dev/%.dev.jsonl.gz/.some.jsonl.gz}"
  done
  finish
fi

# synthetic NAME OPTION...: synthesises sentences of the text, none of which is in a set that is scored
synthetic() {
  python "$(dirname "${BASH_SOURCE[0]}")/../synthesis/sentences.py" --text "$text" \
    --exclude "$cuts"/*.dev.jsonl.gz "$cuts"/*.test.jsonl.gz --processes "$(nproc)" --out "$cuts/$1" "${@:2}"
  rm -rf "$cuts/wav/$1"
  python -m asr.corpus prepare "$cuts/$1/manifest.jsonl" --wav "$cuts/wav/$1" --out "$cuts/$1.train.jsonl.gz"
}

if [ -n "$kokoro$quick" ] && begin 2 "synthetic speech"; then
  [ -z "$quick" ] || synthetic synthetic-quick --utterances "$quick" --seed 1
  [ -z "$kokoro" ] || synthetic synthetic --utterances 8000 --kokoro "$kokoro/kokoro.onnx" --voices "$kokoro/voices"
  finish
fi

if begin 3 "training (conf/experiment/english.yaml says how long)"; then
  train "$out/first" english "$(joined "$cuts"/*.train.jsonl.gz)" "$(joined "$cuts"/*.some.jsonl.gz)"
  finish
fi

if begin 4 "new utterances of the training speech's words"; then
  splice "$out/first/model" 1 "$cuts"/!(synthetic*).train.jsonl.gz # synthetic voices have said too little
  finish
fi

if begin 5 "training on, distorted (conf/experiment/english_distorted.yaml says how long)"; then
  train "$out/second" english_distorted "$(joined "$cuts"/*.train.jsonl.gz "$cuts/spliced.jsonl.gz")" \
    "$(joined "$cuts"/*.some.jsonl.gz)" "init_from=$(quoted "$out/first/model")"
  finish
fi

if [ -z "$stage" ] && [ "$stop_stage" -ge 6 ] && [ "$more" != "$(cat "$out/.more" 2> /dev/null)" ]; then
  rm -f "$out/.done/6" # the existing trainings stay
fi
if begin 6 "$more trainings more (conf/experiment/english_more.yaml says how long), and the mean of all"; then
  models=("$out/second/model")
  for ((i = 1; i <= more; i++)); do
    rm -rf "$cuts/spliced-$i"
    python -m asr.corpus splice "$cuts/aligned.jsonl.gz" --seed "$i" --wav "$cuts/spliced-$i" \
      --out "$cuts/spliced-$i.jsonl.gz"
    train "$out/more/$i" english_more "$(joined "$cuts"/*.train.jsonl.gz "$cuts/spliced-$i.jsonl.gz")" \
      "$(joined "$cuts"/*.some.jsonl.gz)" "init_from=$(quoted "$out/second/model")" "seed=$i"
    models+=("$out/more/$i/model")
  done
  rm -rf "$out/model" # with the decoding tuned for another one
  python -m asr.average "${models[@]}" --out "$out/model" --dtype int8
  echo "$more" > "$out/.more"
  finish
fi

if [ -n "$text" ] && begin 7 "language model"; then
  # human transcripts count twice; the synthetic ones are part of the text
  people=("$cuts"/!(synthetic*).train.jsonl.gz)
  language_model "$text" model.decoder_layers=3 epochs=3 export=int8 data.joined=0.25 \
    "data.transcripts=$(joined "${people[@]}" "${people[@]}")"
  finish
fi

if begin 8 "weights of decoding, confidences"; then
  fused=()
  [ -z "$text" ] || fused=(--lm "$out/lm/model" --lm-weights 0.5 0.7 --ilm-weights 0 0.5 --beam-size 6)
  python -m asr.tune "$cuts"/*.some.jsonl.gz --model "$out/model" --ctc-weights 0.3 0.5 --length-bonuses 0 0.5 \
    ${fused[@]+"${fused[@]}"} --write
  # if this CPU is fast at integer arithmetic, the model is tuned to decode in int8, with matching confidences
  if python -c 'import sys, torch; from asr.decode.quantization import can_quantize as can
sys.exit(not can(torch.device("cpu")))'; then
    python -m asr.tune "$cuts"/*.some.jsonl.gz --model "$out/model" --device cpu --precision int8 --write
  fi
  finish
fi

if begin 9 WER; then
  {
    echo "| set | WER, errors |"
    echo "| --- | --- |"
    for set in "$cuts"/*.dev.jsonl.gz "$cuts"/*.test.jsonl.gz; do
      errors=$(wer "$set")
      echo "| $(basename "$set" .jsonl.gz) | $errors |"
    done
  } | tee "$out/RESULTS.md"
  finish
fi
