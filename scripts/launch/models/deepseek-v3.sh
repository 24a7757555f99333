# shellcheck shell=bash disable=SC2034  # variables for torchrun.sh, which sources this
# DeepSeek-V3: sizes as published (auxiliary-loss-free routing); the defaults are for 1024 GPUs of 80 GB. MTP=0 leaves out
# multi-token prediction. Sourced by ../torchrun.sh.
: "${TP:=1}" "${PP:=16}" "${VPP:=1}" "${EP:=64}" "${SEQ_LENGTH:=4096}" "${GLOBAL_BATCH:=4096}" "${MTP:=1}"
vocabulary=129280
model=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --kv-channels 128 --qk-layernorm
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --num-experts 256 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type none --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size "$EP"
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
gpu_only=(--moe-grouped-gemm)  # asks the GPU what it is, so not for a dry run
[ "$MTP" = 0 ] || model+=(--mtp-num-layers "$MTP" --mtp-loss-scaling-factor 0.1)
