#!/usr/bin/env bash
# Serves org/Dense-8B with vLLM 0.27.0: 3 x aggregated on 4 h200_sxm.
# Written by fpmsdk VERSION from the configuration of a prediction.
# Needs one machine with 12 GPUs. Workers listen on port 8000 and the following ones.
# Put a load balancer in front of them; it is not started here.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Worker 0, aggregated: 4 h200_sxm (tensor 4)
CUDA_VISIBLE_DEVICES=0,1,2,3 \
  vllm serve org/Dense-8B \
    --port 8000 \
    --tensor-parallel-size 4 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 1 \
    --max-num-batched-tokens 16384 \
    --max-num-seqs 512 \
    --max-model-len 8192 \
    --enable-chunked-prefill \
    --block-size 32 \
    --gpu-memory-utilization 0.85 \
    --enable-prefix-caching &

# Worker 1, aggregated: 4 h200_sxm (tensor 4)
CUDA_VISIBLE_DEVICES=4,5,6,7 \
  vllm serve org/Dense-8B \
    --port 8001 \
    --tensor-parallel-size 4 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 1 \
    --max-num-batched-tokens 16384 \
    --max-num-seqs 512 \
    --max-model-len 8192 \
    --enable-chunked-prefill \
    --block-size 32 \
    --gpu-memory-utilization 0.85 \
    --enable-prefix-caching &

# Worker 2, aggregated: 4 h200_sxm (tensor 4)
CUDA_VISIBLE_DEVICES=8,9,10,11 \
  vllm serve org/Dense-8B \
    --port 8002 \
    --tensor-parallel-size 4 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 1 \
    --max-num-batched-tokens 16384 \
    --max-num-seqs 512 \
    --max-model-len 8192 \
    --enable-chunked-prefill \
    --block-size 32 \
    --gpu-memory-utilization 0.85 \
    --enable-prefix-caching &

wait -n
exit $?
