#!/usr/bin/env bash
# Mini LibriSpeech: 5 h of train-clean-5, scored on dev-clean-2; a recipe for an afternoon and a CPU.
#   recipes/mini_librispeech/run.sh --data DIR [--text FILE] [--out DIR] [--stage 1] [--stop-stage 7] [option=value ...]
# Otherwise the same as recipes/librispeech/run.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/../librispeech/run.sh" --subset mini "$@"
