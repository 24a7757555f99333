# shellcheck shell=bash disable=SC2034  # variables for torchrun.sh, which sources this
# Llama-3-70B: sizes as published; the defaults fit 64 GPUs of 80 GB. Sourced by ../torchrun.sh.
: "${TP:=4}" "${PP:=8}" "${VPP:=1}" "${SEQ_LENGTH:=8192}" "${GLOBAL_BATCH:=128}"
vocabulary=128256
model=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --rotary-base 500000
)
