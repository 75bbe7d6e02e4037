#!/usr/bin/env bash
# Learning without transcripts: an encoder is trained on the audio of all training corpora, a recogniser starts from it
# with one hour of transcribed speech, and another one is trained from scratch, for as many steps.
#   recipes/pretrain/run.sh --speech DIR --labelled CORPUS --dev CORPUS
#                           [--out exp/pretrain] [--stage 1] [--stop-stage 5] [option=value ...]
# DIR holds corpora of any form, named *.train (as for recipes/english/run.sh), whose transcripts are not used; those of
# each CORPUS are, for example LibriSpeech/train-clean-5 and dev-clean-2. Options that asr.pretrain and asr.train share
# may follow.
# One core of a server CPU with AMX-BF16 needs half an hour for pre-training (22 h of audio, 3 epochs), then a good half
# hour for each of the two recognisers. The same command, without --stage, continues an interrupted run.
set -euo pipefail
# shellcheck source=../stages.sh
. "$(dirname "${BASH_SOURCE[0]}")/../stages.sh"
speech='' labelled='' dev=''
parse "speech labelled dev" exp/pretrain 5 "$@"
[[ -n $labelled && -n $dev ]] || wrong "--labelled and --dev are corpora with transcripts"

if begin 1 "cuts; 286 utterances (1 h) with their transcripts, 100 of dev to choose checkpoints by"; then
  corpora train
  rm -rf "$cuts"/{*.jsonl.gz,wav} # perhaps from other speech
  prepare --untranscribed "${found[@]}"
  for each in labelled dev; do
    python -m asr.corpus prepare "${!each}" --wav "$cuts/wav/$each" --out "$cuts/$each.jsonl.gz"
  done
  python -m asr.corpus sample "$cuts/labelled.jsonl.gz" --utterances 286 --out "$cuts/hour.jsonl.gz"
  python -m asr.corpus sample "$cuts/dev.jsonl.gz" --utterances 100 --out "$cuts/some.jsonl.gz"
  finish
fi

fit() { # COMMAND FOLDER OPTION...
  run "$@" "data.dev=$(joined "$cuts/some.jsonl.gz")" data.max_seconds=20 ${options[@]+"${options[@]}"}
}

recogniser() { # FOLDER [OPTION...]
  fit asr.train "$1" experiment=mini_librispeech "data.train=$(joined "$cuts/hour.jsonl.gz")" data.batch_seconds=40 \
    data.global_batch_seconds=40 model.subsampling=8 optimizer.kind=adamw optimizer.lr=1.5e-3 average=10 epochs=50 \
    validate_every=5 "${@:2}"
}

if begin 2 "pre-training on all sound"; then
  fit asr.pretrain "$out/encoder" "data.train=$(joined "$cuts"/*.train.jsonl.gz)" data.batch_seconds=80 \
    data.global_batch_seconds=80 model.d_model=192 model.ffn_dim=768 model.subsampling=8 model.conv_kernel=9 \
    optimizer.warmup=300 epochs=3
  finish
fi

if begin 3 "a recogniser from the encoder"; then
  recogniser "$out/from_encoder" "init_from=$(quoted "$out/encoder/model")"
  finish
fi

if begin 4 "the same from nothing"; then
  recogniser "$out/from_nothing"
  finish
fi

if begin 5 WER; then
  {
    echo "| begins from | decoding | WER, errors |"
    echo "| --- | --- | --- |"
    for model in from_encoder from_nothing; do
      for decoding in ctc beam; do
        errors=$(wer "$cuts/dev.jsonl.gz" --model "$out/$model/model" --strategy $decoding)
        echo "| ${model#from_} | $decoding | $errors |"
      done
    done
  } | tee "$out/RESULTS.md"
  finish
fi
