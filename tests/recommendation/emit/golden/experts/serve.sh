#!/usr/bin/env bash
# Serves org/Mixture-8x1B with vLLM 0.27.0: 1 x aggregated on 4 h200_sxm.
# Written by fpmsdk VERSION from the configuration of a prediction.
# Needs one machine with 4 GPUs. Workers listen on port 8000 and the following ones.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Worker 0, aggregated: 4 h200_sxm (attention_data 4, moe_expert 4)
CUDA_VISIBLE_DEVICES=0,1,2,3 \
  vllm serve org/Mixture-8x1B \
    --port 8000 \
    --revision 0123456789abcdef0123456789abcdef01234567 \
    --tensor-parallel-size 1 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 4 \
    --enable-expert-parallel \
    --max-num-batched-tokens 2048 \
    --max-num-seqs 64 \
    --max-model-len 4096 \
    --block-size 64 \
    --num-gpu-blocks-override 5000 \
    --no-enable-prefix-caching \
    --kv-cache-dtype fp8 &

wait -n
exit $?
