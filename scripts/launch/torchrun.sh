#!/usr/bin/env bash
# Train a model of models/ with balanced stages and packed documents, on one machine or several. See --help.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<HELP
usage: [VARIABLE=VALUE ...] bash scripts/launch/torchrun.sh [--dry-run] MODEL [MORE FLAGS OF MEGATRON'S OR OURS ...]

Runs torchrun with -m megatron_balance.run and --balanced-pipeline --varlen-packing --calculate-per-token-loss.
MODEL: $(cd "$here/models" && printf '%s ' *.sh | sed 's/\.sh//g')

  --dry-run   plan for NNODES x GPUS_PER_NODE GPUs, print the plan and what attention within documents costs, and stop; needs no GPU
              (GPU, default H100, says for which)
  -h, --help  this text

Model and data:
  DATA          prefix of an indexed data set, or a blend ("0.7 a 0.3 b"); default: Megatron's mock data
  TOKENIZER     name or folder of a Hugging Face tokenizer; default: none, numbers up to the model's vocabulary
  SEQ_LENGTH, MICRO_BATCH (1), GLOBAL_BATCH, ITERATIONS (1000), LEARNING_RATE (3e-4)
  CHECKPOINTS   folder to save to and resume from; default: none
  MEGATRON_LM   a Megatron-LM checkout, whose pretrain_gpt.py is run; default: our own on the installed megatron-core

Parallelism (defaults are the model's, see models/):
  TP, PP, VPP, EP   tensor, pipeline, virtual stages of each pipeline rank, experts; the rest is data parallel

Machines; the same command on each, but for NODE_RANK:
  GPUS_PER_NODE (8), NNODES (1), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (29500)
  PYTORCH_CUDA_ALLOC_CONF  expandable_segments:True, where shapes vary; PYTORCH_ALLOC_CONF is left as it is
  DEVICE        cuda; cpu trains on the CPU with gloo, for sizes made small by further flags

Examples:
  bash scripts/launch/torchrun.sh llama3-8b                                      # one machine
  NNODES=8 bash scripts/launch/torchrun.sh --dry-run llama3-70b                  # its plan, on a laptop
  NNODES=8 NODE_RANK=3 MASTER_ADDR=node0 bash scripts/launch/torchrun.sh llama3-70b --save-interval 500
HELP
}

dry_run=false
case "${1:-}" in
    -h | --help) usage && exit ;;
    --dry-run) dry_run=true && shift ;;
esac
name=${1:-}
[ -n "$name" ] && [ -f "$here/models/$name.sh" ] || { usage >&2 && exit 2; }
shift

# What the model's file sets, beside defaults of the sizes.
vocabulary=
model=()
gpu_only=()
# shellcheck source=/dev/null
source "$here/models/$name.sh"
: "${NNODES:=1}" "${GPUS_PER_NODE:=8}" "${NODE_RANK:=0}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}"

flags=(
    "${model[@]}"
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --bf16
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "$GLOBAL_BATCH"
    --train-iters "${ITERATIONS:-1000}" --lr "${LEARNING_RATE:-3e-4}" --lr-decay-style cosine --lr-warmup-fraction 0.01
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95
    --split "99,1,0" --eval-iters 0 --eval-interval 1000 --log-interval 1
    --balanced-pipeline --varlen-packing --calculate-per-token-loss
)
[ "$TP" = 1 ] || flags+=(--sequence-parallel)
[ "$VPP" = 1 ] || flags+=(--num-virtual-stages-per-pipeline-rank "$VPP")
if [ -n "${DATA:-}" ]; then
    read -ra data <<<"$DATA"
    flags+=(--data-path "${data[@]}")
else
    flags+=(--mock-data)
fi
if [ -n "${TOKENIZER:-}" ]; then
    flags+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
    flags+=(--tokenizer-type NullTokenizer --vocab-size $((vocabulary - 1)))  # and the end of a document
fi
[ -z "${CHECKPOINTS:-}" ] || flags+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 1000)
script=()
[ -z "${MEGATRON_LM:-}" ] || script=("$MEGATRON_LM/pretrain_gpt.py")

if $dry_run; then
    exec python -m megatron_balance.run --device cpu ${script[@]+"${script[@]}"} "${flags[@]}" \
        "--balanced-pipeline-dry-run=$((NNODES * GPUS_PER_NODE))" --balanced-pipeline-device "${GPU:-H100}" "$@"
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}  # Megatron insists on it
# Micro-batches of variable shape ask for memory in ever new sizes, which would leave holes. Megatron refuses the setting together
# with CUDA graphs, whose shapes are fixed, and with buffers that are registered with NCCL.
case " ${flags[*]} $* " in
    *cuda-graph* | *nccl-ub* | *"-shapes fixed "* | *"-shapes=fixed "*) ;;
    *) [ -n "${PYTORCH_ALLOC_CONF:-}" ] || export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True} ;;
esac
exec python -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m megatron_balance.run --device "${DEVICE:-cuda}" ${script[@]+"${script[@]}"} "${flags[@]}" ${gpu_only[@]+"${gpu_only[@]}"} "$@"
