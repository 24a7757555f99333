# shellcheck shell=bash disable=SC2034  # variables for torchrun.sh, which sources this
# Llama-3-8B: sizes as published; the defaults fit 8 GPUs of 80 GB. Sourced by ../torchrun.sh.
: "${TP:=1}" "${PP:=4}" "${VPP:=1}" "${SEQ_LENGTH:=8192}" "${GLOBAL_BATCH:=128}"
vocabulary=128256
model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --rotary-base 500000
)
