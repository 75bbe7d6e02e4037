# shellcheck shell=bash disable=SC2034
# What the recipes share; run.sh sources it. Sets: data text out stage stop_stage options cuts.

export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} # huge pages: a tenth of a training's time on a CPU

# parse "--data-flag [--text]" DEFAULT_OUT LAST_STAGE ARGUMENT...
parse() {
  local flag=${1%% *} text_flag=${1##* }
  data='' text='' out=$2 stage='' stop_stage=$3 options=() current=''
  shift 3
  while [ $# -gt 0 ]; do
    case $1 in
      "$flag" | "$text_flag" | --out | --stage | --stop-stage) [ $# -gt 1 ] || wrong "$1 needs a value" ;;
      *=*) options+=("$1") && shift && continue ;;
      *) wrong "unknown argument $1; see the head of run.sh" ;;
    esac
    case $1 in
      "$flag") data=$2 ;;
      "$text_flag") text=$2 ;;
      --out) out=$2 ;;
      --stage) stage=$2 ;;
      --stop-stage) stop_stage=$2 ;;
    esac
    shift 2
  done
  cuts=$out/cuts
  set -E
  trap 'failed' ERR
}

wrong() {
  echo "run.sh: $1" >&2
  exit 2
}

failed() {
  trap - ERR
  [ -z "$current" ] || echo "run.sh: stage $current failed; the same command goes on with it" >&2
}

# begin NUMBER TITLE: whether the stage is to run, and says so. One that was done runs again where --stage asks for it.
begin() {
  [ "${stage:-1}" -le "$1" ] && [ "$stop_stage" -ge "$1" ] || return 1
  if [ -z "$stage" ] && [ -e "$out/.done/$1" ]; then
    echo "Stage $1: $2: done before (--stage $1 does it again)"
    return 1
  fi
  current=$1
  echo "Stage $1: $2"
}

# finish: the stage that was begun is done; what was made from its results before is not
finish() {
  local later
  mkdir -p "$out/.done"
  touch "$out/.done/$current"
  for later in "$out"/.done/*; do
    [ "$(basename "$later")" -le "$current" ] || rm "$later"
  done
  current=''
}

# run COMMAND FOLDER OPTION...: a training in FOLDER; goes on where it was interrupted
run() {
  local resume=false
  [ -e "$2/checkpoints/last.ckpt" ] && resume=true
  python -m "$1" "${@:3}" "out=$2" "resume=$resume"
}

# train EXPERIMENT TRAIN DEV: Hydra lists of cuts
train() {
  run asr.train "$out" "experiment=$1" "data.train=$2" "data.dev=$3" ${options[@]+"${options[@]}"}
}

# language_model TEXT: of the tokens of the model in $out
language_model() {
  run asr.train_lm "$out/lm" "tokenizer=$out/model" "data.train=[$1]" export=float16
}

# wer CUTS [OPTION...] of the model in $out, or another: "1.23 % (... substitutions, ...)"
wer() {
  python -m asr.evaluate "$1" --model "$out/model" "${@:2}" | sed -n '1s/^WER //p'
}

# joined WORD...: a Hydra list
joined() {
  local IFS=,
  echo "[$*]"
}
