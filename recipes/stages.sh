# What the recipes share; run.sh sources it. Sets: data out stage stop_stage options.

# parse --data-flag DEFAULT_OUT ARGUMENT...
parse() {
  local flag=$1
  data='' out=$2 stage=1 stop_stage=3 options=()
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      "$flag") data=$2; shift 2 ;;
      --out) out=$2; shift 2 ;;
      --stage) stage=$2; shift 2 ;;
      --stop-stage) stop_stage=$2; shift 2 ;;
      *=*) options+=("$1"); shift ;;
      *) wrong "unknown argument $1; see the head of run.sh" ;;
    esac
  done
  cuts=$out/cuts
}

wrong() {
  echo "run.sh: $1" >&2
  exit 2
}

# begin NUMBER TITLE: whether the stage is to run; says so where it is
begin() {
  [ "$stage" -le "$1" ] && [ "$stop_stage" -ge "$1" ] && echo "Stage $1: $2"
}

# train EXPERIMENT TRAIN DEV: Hydra lists of cuts; goes on where a training was interrupted
train() {
  local resume=false
  [ -e "$out/checkpoints/last.ckpt" ] && resume=true
  python -m asr.train "experiment=$1" "data.train=$2" "data.dev=$3" "out=$out" "resume=$resume" \
    ${options[@]+"${options[@]}"}
}

# wer CUTS [OPTION...]: "1.23 % (... substitutions, ...)"
wer() {
  python -m asr.evaluate "$1" --model "$out/model" "${@:2}" | sed -n '1s/^WER //p'
}
