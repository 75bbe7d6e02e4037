# shellcheck shell=bash disable=SC2034
# What the recipes share; run.sh sources it. Sets: out stage stop_stage options cuts, and what
# the recipe's own flags say.

export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} # huge pages: a tenth of a training's time on a CPU
tcmalloc=$(ldconfig -p 2> /dev/null | sed -n 's|.* => \(/.*/libtcmalloc_minimal\.so\.4\)$|\1|p') || tcmalloc=''
if [ -z "${LD_PRELOAD:-}" ] && [ -n "$tcmalloc" ]; then
  export LD_PRELOAD=${tcmalloc%%$'\n'*} # finds blocks more quickly where a heap has holes of many sizes: a seventh more
fi

shopt -s nullglob extglob

# parse "FLAG..." DEFAULT_OUT LAST_STAGE ARGUMENT...: --FLAG VALUE goes into the variable of that name, and of --out,
# --stage and --stop-stage; option=value into `options`
parse() {
  local flags=" $1 out stage stop-stage " name
  out=$2 stage='' stop_stage=$3 options=() current=''
  shift 3
  while [ $# -gt 0 ]; do
    name=${1#--}
    if [[ $name == help ]]; then
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      exit 0
    elif [[ $1 == --* && $flags == *" $name "* ]]; then
      [ $# -gt 1 ] || wrong "$1 needs a value"
      printf -v "${name//-/_}" %s "$2"
      shift 2
    elif [[ $1 != --* && $1 == *=* ]]; then
      options+=("$1")
      shift
    else
      wrong "unknown argument $1; see run.sh --help"
    fi
  done
  [[ ${stage:-1}$stop_stage =~ ^[0-9]+$ ]] || wrong "--stage and --stop-stage are numbers"
  cuts=$out/cuts
  set -E
  trap 'failed' ERR
}

wrong() {
  echo "run.sh: $1" >&2
  exit 2
}

failed() {
  [ "$BASH_SUBSHELL" = 0 ] || return 0 # the shell around says it
  trap - ERR
  local again="the same command${stage:+, without --stage,}"
  [ -z "$current" ] || echo "run.sh: stage $current failed; when its cause is mended, $again goes on with it" >&2
}

# begin NUMBER TITLE: whether the stage is to run, and says so. One that was done runs again where --stage asks for it,
# or a stage before it was done again; one that was interrupted goes on.
begin() {
  [ "${stage:-1}" -le "$1" ] && [ "$stop_stage" -ge "$1" ] || return 1
  if [ -z "$stage" ] && [ -e "$out/.done/$1" ]; then
    echo "Stage $1: $2: done before (--stage $1 does it again)"
    return 1
  fi
  mkdir -p "$out/.done" "$out/.stale" "$out/.trained" || wrong "--out '$out' cannot be written to"
  if [ -z "${locked:-}" ] && command -v flock > /dev/null; then # its commands hold the lock, too, should they outlive it
    exec 9> "$out/.lock" || wrong "--out '$out' cannot be written to"
    locked=0
    flock -n 9 || locked=$? # others than 1 are of a file system that has no locks
    [ "$locked" != 1 ] || wrong "another run is at work in $out"
  fi
  current=$1
  if [ -e "$out/.done/$1" ] || [ -e "$out/.stale/$1" ]; then
    if [ -e "$out/.trained/$1" ]; then
      while read -r folder; do # with what was chosen for the model that goes
        rm -rf "$out$folder"/{checkpoints,tensorboard,model/decoding.json,model/lm}
      done < "$out/.trained/$1"
    fi
    rm -f "$out"/.{done,stale,trained}/"$1"
  fi
  echo "Stage $1: $2"
}

# finish: the stage that was begun is done; what was made from its results before is not
finish() {
  local later
  touch "$out/.done/$current"
  for later in "$out"/.done/* "$out"/.trained/*; do
    if [ -e "$later" ] && [ "$(basename "$later")" -gt "$current" ]; then
      touch "$out/.stale/$(basename "$later")"
      rm -f "$out/.done/$(basename "$later")"
    fi
  done
  current=''
}

# corpora PART...: those of $speech that are named *.PART, folders, tars, manifests or cuts, in `found`; some of each PART
corpora() {
  local part those
  found=()
  for part in "$@"; do
    those=("$speech"/*."$part"{,.tar,.jsonl,.jsonl.gz})
    [ ${#those[@]} -gt 0 ] || wrong "--speech '$speech' holds no corpus *.$part (a folder, .tar, .jsonl or .jsonl.gz)"
    found+=("${those[@]}")
  done
}

# prepare [--untranscribed] CORPUS...: each as $cuts/NAME.jsonl.gz, decoded once
prepare() {
  local each name flags=()
  if [ "$1" = --untranscribed ]; then
    flags=("$1")
    shift
  fi
  for each in "$@"; do
    name=$(basename "${each%.gz}")
    name=${name%.jsonl}
    name=${name%.tar}
    [ ! -e "$cuts/$name.jsonl.gz" ] || wrong "--speech '$speech' holds two corpora called $name"
    python -m asr.corpus prepare "$each" ${flags[@]+"${flags[@]}"} --wav "$cuts/wav/$name" --out "$cuts/$name.jsonl.gz"
  done
}

# quoted PATH: as Hydra reads it, whatever is in it
quoted() {
  echo "'${1//\'/\\\'}'"
}

# run COMMAND FOLDER OPTION...: a training in FOLDER, $out or below it; goes on where it was interrupted
run() {
  local resume=false folder=${2#"$out"} # within $out, which may be copied or moved
  if [ -e "$2/checkpoints/last.ckpt" ]; then
    resume=true
  elif grep -qsxF -- "$folder" "$out/.trained/$current"; then
    rm -rf "$2/checkpoints" # it ended before it could go on
  fi
  echo "$folder" >> "$out/.trained/$current"
  python -m "$1" "${@:3}" "out=$(quoted "$2")" "resume=$resume"
}

# train FOLDER EXPERIMENT TRAIN DEV [OPTION...]: Hydra lists of cuts; the command line's options count most
train() {
  run asr.train "$1" "experiment=$2" "data.train=$3" "data.dev=$4" "${@:5}" ${options[@]+"${options[@]}"}
}

# splice MODEL COPIES CUTS...: new utterances of the words of CUTS, in $cuts/spliced.jsonl.gz
splice() {
  rm -rf "$cuts/spliced"
  python -m asr.align "${@:3}" --model "$1" --out "$cuts/aligned.jsonl.gz"
  python -m asr.corpus splice "$cuts/aligned.jsonl.gz" --copies "$2" --wav "$cuts/spliced" --out "$cuts/spliced.jsonl.gz"
}

# language_model TEXT OPTION...: of the tokens of the model in $out
language_model() {
  run asr.train_lm "$out/lm" "tokenizer=$(quoted "$out/model")" "data.train=$(joined "$1")" optimizer.kind=muon "${@:2}"
}

# wer CUTS [OPTION...] of the model in $out, or another: "1.23 % (... substitutions, ...)"
wer() {
  python -m asr.evaluate "$1" --model "$out/model" "${@:2}" | sed -n '1s/^WER //p'
}

# joined WORD...: a Hydra list
joined() {
  local IFS=, word words=()
  for word in "$@"; do words+=("$(quoted "$word")"); done
  echo "[${words[*]}]"
}
