// What runs on the cards: patterns, their check, peer loads and stores, a chain of dependent loads, a one-shot all-reduce.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

constexpr int kMaxGpus = 16;
constexpr int kBlocks = 64, kThreads = 256;

// Another value for every word and every seed, so that a word of an earlier test never passes for one of this.
__host__ __device__ inline uint32_t word(uint64_t index, uint32_t seed) {
    uint32_t x = static_cast<uint32_t>(index) * 2654435761u ^ static_cast<uint32_t>(index >> 32) ^ seed;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

__device__ inline uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__device__ inline uint32_t load_system(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_system(uint32_t *address, uint32_t value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Write the pattern; `target` may lie on another card: then these are peer stores.
__global__ void write_pattern(uint4 *target, uint64_t count, uint32_t seed) {
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count; i += uint64_t(gridDim.x) * blockDim.x)
        target[i] = make_uint4(word(4 * i, seed), word(4 * i + 1, seed), word(4 * i + 2, seed), word(4 * i + 3, seed));
    __threadfence_system();
}

// Copy by loads; `source` may lie on another card: then these are peer loads.
__global__ void copy_words(uint4 *target, const uint4 *source, uint64_t count) {
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count; i += uint64_t(gridDim.x) * blockDim.x)
        target[i] = source[i];
    __threadfence_system();
}

// Count the words that are not the pattern.
__global__ void check_pattern(const uint32_t *words, uint64_t count, uint32_t seed, unsigned long long *wrong) {
    unsigned long long mine = 0;
    for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < count; i += uint64_t(gridDim.x) * blockDim.x)
        mine += words[i] != word(i, seed);
    if (mine) atomicAdd(wrong, mine);
}

// A chain through memory: entry k names the next one, `stride` words further.
__global__ void make_chain(uint32_t *chain, uint32_t entries, uint32_t stride) {
    for (uint32_t k = threadIdx.x; k < entries; k += blockDim.x) chain[k * stride] = (k + 1) % entries * stride;
}

// One thread, each load waits for the one before: what one access to the other card's memory takes.
__global__ void follow_chain(const uint32_t *chain, uint32_t steps, uint64_t *elapsed_ns, uint32_t *end) {
    uint32_t at = 0;
    const uint64_t start = now_ns();
    for (uint32_t k = 0; k < steps; ++k) at = load_system(chain + at);
    *elapsed_ns = now_ns() - start;
    *end = at;
}

struct Group {
    const float *data[kMaxGpus];  // each card's summand
    uint32_t *flags[kMaxGpus];    // on each card: one word for every card and block
    int world;
};

__global__ void fill_summand(float *data, uint32_t count, int rank, uint32_t seed) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        data[i] = static_cast<float>((i + seed) % 1021 + rank);
}

// All blocks of the same number meet. False where one did not come within the limit.
__device__ bool meet(const Group &group, int rank, uint32_t epoch, uint64_t deadline_ns) {
    __shared__ int late;
    if (threadIdx.x == 0) late = 0;
    __syncthreads();
    if (threadIdx.x < group.world) {
        const int peer = threadIdx.x;
        __threadfence_system();
        store_system(group.flags[peer] + rank * gridDim.x + blockIdx.x, epoch);
        while (load_system(group.flags[rank] + peer * gridDim.x + blockIdx.x) < epoch) {
            if (now_ns() > deadline_ns) {
                late = 1;
                break;
            }
        }
    }
    __syncthreads();
    return late == 0;
}

// One-shot all-reduce, as the custom all-reduce kernels do it: everybody reads from everybody.
// The loop is in here, because 8 launches from one thread take longer than a small all-reduce.
__global__ void all_reduce(Group group, float *out, uint32_t count, int rank, uint32_t rounds, uint64_t limit_ns,
                           uint64_t *elapsed_ns, uint32_t *late) {
    const uint64_t deadline = now_ns() + limit_ns;
    uint64_t start = 0;
    for (uint32_t round = 0; round < rounds; ++round) {
        if (!meet(group, rank, 2 * round + 1, deadline)) {
            if (threadIdx.x == 0) *late = 1;
            return;
        }
        if (round == 0) start = now_ns();  // the launches do not come at once
        for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
            float sum = 0;
            for (int peer = 0; peer < group.world; ++peer) sum += __ldcv(group.data[peer] + i);
            out[i] = sum;
        }
        if (!meet(group, rank, 2 * round + 2, deadline)) {
            if (threadIdx.x == 0) *late = 1;
            return;
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *elapsed_ns = now_ns() - start;
}

// The summands are whole numbers far below 2^24, so the sum is exact in any order.
__global__ void check_sum(const float *out, uint32_t count, int world, uint32_t seed, unsigned long long *wrong) {
    unsigned long long mine = 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        mine += out[i] != static_cast<float>(world * ((i + seed) % 1021) + world * (world - 1) / 2);
    if (mine) atomicAdd(wrong, mine);
}
