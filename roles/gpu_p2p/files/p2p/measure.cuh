// The steps that a worker carries out, one result each. A CUDA error ends a step by an exception.
#pragma once
#include "kernels.cuh"
#include "nccl.h"
#include "record.h"
#include <algorithm>
#include <cctype>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

inline void must(cudaError_t status, const char *what) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}
#define MUST(call) must((call), #call)

struct Settings {
    uint64_t bytes = 64ull << 20;  // of one transfer
    int repeats = 5;
    double limit_s = 20;
    std::string nccl;
};

class Measure {
  public:
    explicit Measure(const Settings &settings) : settings_(settings) { MUST(cudaGetDeviceCount(&count_)); }

    // What this card's link to the host gives with pinned memory: the measure for what it gives to other cards.
    Record host(int gpu) {
        Card &card = use(gpu);
        void *pinned = nullptr;
        MUST(cudaMallocHost(&pinned, settings_.bytes));
        const auto copy = [&](void *to, const void *from, cudaMemcpyKind kind) {
            return rate([&] { MUST(cudaMemcpyAsync(to, from, settings_.bytes, kind, card.stream)); }, card);
        };
        const double down = copy(card.a, pinned, cudaMemcpyHostToDevice);
        const double up = copy(pinned, card.a, cudaMemcpyDeviceToHost);
        // Now, while the card works: an idle one lets its link fall back.
        Record record;
        for (const char *name : {"current_link_speed", "max_link_speed", "current_link_width", "max_link_width"})
            record.text(name, in_sysfs(gpu, name));
        MUST(cudaFreeHost(pinned));
        return record.number("from_host_gb_s", down).number("to_host_gb_s", up);
    }

    // `from` reaches into the memory of `to`: copies by the copy engine, stores and loads by a kernel on `from`.
    Record pair(int from, int to) {
        Card &near = use(from), &far = use(to);
        int advertised = 0;
        MUST(cudaDeviceCanAccessPeer(&advertised, from, to));
        MUST(cudaSetDevice(from));
        if (advertised) {
            const cudaError_t enabled = cudaDeviceEnablePeerAccess(to, 0);
            if (enabled != cudaErrorPeerAccessAlreadyEnabled) MUST(enabled);
            cudaGetLastError();
        }
        Record record;
        record.truth("advertised", advertised);
        const uint32_t seed = ++seed_;

        write_pattern<<<kBlocks, kThreads, 0, near.stream>>>(near.a, quads(), seed);
        poison(far);
        const auto copy = [&] { MUST(cudaMemcpyPeerAsync(far.a, to, near.a, from, settings_.bytes, near.stream)); };
        copy();
        finish(near);
        record.integer("copy_wrong_words", wrong(far, far.a, seed));
        record.number("copy_gb_s", rate(copy, near));
        if (!advertised) return record;  // a kernel would fault

        poison(far);
        MUST(cudaSetDevice(from));
        const auto store = [&](uint32_t s) { write_pattern<<<kBlocks, kThreads, 0, near.stream>>>(far.a, quads(), s); };
        store(seed + 0x10000);
        finish(near);
        record.integer("store_wrong_words", wrong(far, far.a, seed + 0x10000));
        record.number("store_gb_s", rate([&] { store(seed + 0x20000); }, near));

        MUST(cudaSetDevice(to));
        write_pattern<<<kBlocks, kThreads, 0, far.stream>>>(far.a, quads(), seed + 0x30000);
        finish(far);
        poison(near);
        MUST(cudaSetDevice(from));
        const auto load = [&] { copy_words<<<kBlocks, kThreads, 0, near.stream>>>(near.a, far.a, quads()); };
        load();
        finish(near);
        record.integer("load_wrong_words", wrong(near, near.a, seed + 0x30000));
        record.number("load_gb_s", rate(load, near));
        record.number("load_latency_us", latency_us(near, far));
        return record;
    }

    // All cards at once through peer memory, which only cards that all reach each other can do.
    Record all_reduce(uint32_t bytes) {
        const uint32_t count = bytes / sizeof(float), rounds = 50;
        const int blocks = static_cast<int>(std::min<uint32_t>(16, (count + kThreads - 1) / kThreads));
        Group group{};
        group.world = count_;
        std::vector<uint64_t *> elapsed(count_);
        std::vector<uint32_t *> late(count_);
        for (int gpu = 0; gpu < count_; ++gpu) {
            Card &card = use(gpu);
            for (int peer = 0; peer < count_; ++peer) {
                if (peer == gpu) continue;
                const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
                if (enabled != cudaErrorPeerAccessAlreadyEnabled) MUST(enabled);
                cudaGetLastError();
            }
            MUST(cudaMemsetAsync(card.flags, 0, kFlagBytes, card.stream));
            fill_summand<<<kBlocks, kThreads, 0, card.stream>>>(reinterpret_cast<float *>(card.a), count, gpu, bytes);
            group.data[gpu] = reinterpret_cast<float *>(card.a);
            group.flags[gpu] = card.flags;
            elapsed[gpu] = card.numbers;
            late[gpu] = reinterpret_cast<uint32_t *>(card.numbers + 1);
            MUST(cudaMemsetAsync(card.numbers, 0, kNumberBytes, card.stream));
            finish(card);
        }
        // The kernels' own limit comes first: who is killed in the middle of a kernel leaves less of an explanation.
        const uint64_t limit_ns = static_cast<uint64_t>(settings_.limit_s * 0.5e9);
        for (int gpu = 0; gpu < count_; ++gpu) {
            Card &card = use(gpu);
            ::all_reduce<<<blocks, kThreads, 0, card.stream>>>(group, reinterpret_cast<float *>(card.b), count, gpu, rounds,
                                                               limit_ns, elapsed[gpu], late[gpu]);
            MUST(cudaGetLastError());
        }
        unsigned long long bad = 0;
        uint32_t waited = 0;
        double longest_us = 0;
        for (int gpu = 0; gpu < count_; ++gpu) {
            Card &card = use(gpu);
            finish(card);
            uint64_t numbers[2];
            MUST(cudaMemcpy(numbers, card.numbers, sizeof numbers, cudaMemcpyDeviceToHost));
            waited += numbers[1] != 0;
            longest_us = std::max(longest_us, numbers[0] / 1e3 / rounds);
        }
        for (int gpu = 0; gpu < count_ && !waited; ++gpu) bad += wrong_sums(use(gpu), count, bytes);
        Record record;
        record.integer("bytes", bytes).integer("late_gpus", waited).integer("wrong_words", bad);
        return waited ? record : record.number("us", longest_us);
    }

    Record nccl(uint32_t bytes, bool p2p) {
        // NCCL reads it once, so this step has a worker of its own.
        if (!p2p) setenv("NCCL_P2P_DISABLE", "1", 1);
        const Nccl lib(settings_.nccl);
        int version = 0;
        lib.must(lib.get_version(&version), "version");
        std::vector<Nccl::Comm> comms(count_);
        lib.must(lib.comm_init_all(comms.data(), count_, nullptr), "initialisation");
        const uint32_t count = bytes / sizeof(float), rounds = 50;
        for (int gpu = 0; gpu < count_; ++gpu) {
            Card &card = use(gpu);
            fill_summand<<<kBlocks, kThreads, 0, card.stream>>>(reinterpret_cast<float *>(card.a), count, gpu, bytes);
            finish(card);
        }
        const auto once = [&] {
            lib.must(lib.group_start(), "group");
            for (int gpu = 0; gpu < count_; ++gpu) {
                Card &card = use(gpu);
                lib.must(lib.all_reduce(card.a, card.b, count, Nccl::kFloat32, Nccl::kSum, comms[gpu], card.stream), "all-reduce");
            }
            lib.must(lib.group_end(), "group");
        };
        const auto all_finish = [&] {
            for (int gpu = 0; gpu < count_; ++gpu) finish(use(gpu));
        };
        once();
        all_finish();
        const auto start = std::chrono::steady_clock::now();
        for (uint32_t round = 0; round < rounds; ++round) once();
        all_finish();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        unsigned long long bad = 0;
        for (int gpu = 0; gpu < count_; ++gpu) bad += wrong_sums(use(gpu), count, bytes);
        return Record().integer("bytes", bytes).integer("version", version).integer("wrong_words", bad).number("us", took.count() / rounds);
    }

  private:
    static constexpr uint32_t kChainEntries = 256, kChainStride = 4096, kChainSteps = 2048;
    static constexpr size_t kFlagBytes = kMaxGpus * kBlocks * sizeof(uint32_t), kNumberBytes = 4 * sizeof(uint64_t);

    struct Card {
        int gpu;
        cudaStream_t stream;
        cudaEvent_t start, stop;
        uint4 *a, *b;
        uint32_t *flags;
        uint64_t *numbers;
    };

    // Empty where the kernel does not show it.
    static std::string in_sysfs(int gpu, const char *name) {
        char bus_id[32] = "";
        MUST(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, gpu));
        std::string path = bus_id, text;
        std::transform(path.begin(), path.end(), path.begin(), [](unsigned char c) { return std::tolower(c); });
        std::ifstream file("/sys/bus/pci/devices/" + path + "/" + name);
        std::getline(file, text);
        return text;
    }

    uint64_t quads() const { return settings_.bytes / sizeof(uint4); }

    // Makes the card the current one. What it needs is allocated when it is first used.
    Card &use(int gpu) {
        MUST(cudaSetDevice(gpu));
        auto found = cards_.find(gpu);
        if (found != cards_.end()) return found->second;
        Card card{};
        card.gpu = gpu;
        MUST(cudaStreamCreateWithFlags(&card.stream, cudaStreamNonBlocking));
        MUST(cudaEventCreate(&card.start));
        MUST(cudaEventCreate(&card.stop));
        MUST(cudaMalloc(&card.a, settings_.bytes));
        MUST(cudaMalloc(&card.b, settings_.bytes));
        MUST(cudaMalloc(&card.flags, kFlagBytes));
        MUST(cudaMalloc(&card.numbers, kNumberBytes));
        return cards_[gpu] = card;
    }

    void finish(const Card &card) {
        MUST(cudaGetLastError());
        MUST(cudaStreamSynchronize(card.stream));
    }

    void poison(Card &card) {
        use(card.gpu);
        MUST(cudaMemsetAsync(card.a, 0xA5, settings_.bytes, card.stream));
        finish(card);
    }

    long long wrong(Card &card, const uint4 *words, uint32_t seed) {
        use(card.gpu);
        MUST(cudaMemsetAsync(card.numbers, 0, kNumberBytes, card.stream));
        auto *counter = reinterpret_cast<unsigned long long *>(card.numbers);
        check_pattern<<<kBlocks, kThreads, 0, card.stream>>>(reinterpret_cast<const uint32_t *>(words), 4 * quads(), seed, counter);
        return counted(card);
    }

    long long wrong_sums(Card &card, uint32_t count, uint32_t seed) {
        MUST(cudaMemsetAsync(card.numbers, 0, kNumberBytes, card.stream));
        auto *counter = reinterpret_cast<unsigned long long *>(card.numbers);
        check_sum<<<kBlocks, kThreads, 0, card.stream>>>(reinterpret_cast<float *>(card.b), count, count_, seed, counter);
        return counted(card);
    }

    long long counted(Card &card) {
        finish(card);
        unsigned long long value = 0;
        MUST(cudaMemcpy(&value, card.numbers, sizeof value, cudaMemcpyDeviceToHost));
        return static_cast<long long>(value);
    }

    // GB/s of the best repetition: others on the machine only make it slower.
    template <typename Transfer> double rate(const Transfer &transfer, Card &card) {
        double best = 0;
        use(card.gpu);
        for (int repeat = 0; repeat < settings_.repeats; ++repeat) {
            MUST(cudaEventRecord(card.start, card.stream));
            transfer();
            MUST(cudaEventRecord(card.stop, card.stream));
            finish(card);
            float ms = 0;
            MUST(cudaEventElapsedTime(&ms, card.start, card.stop));
            best = std::max(best, settings_.bytes / 1e6 / ms);
        }
        return best;
    }

    double latency_us(Card &near, Card &far) {
        use(far.gpu);
        auto *chain = reinterpret_cast<uint32_t *>(far.b);
        make_chain<<<1, kThreads, 0, far.stream>>>(chain, kChainEntries, kChainStride);
        finish(far);
        use(near.gpu);
        follow_chain<<<1, 1, 0, near.stream>>>(chain, kChainEntries, near.numbers, reinterpret_cast<uint32_t *>(near.numbers + 1));
        follow_chain<<<1, 1, 0, near.stream>>>(chain, kChainSteps, near.numbers, reinterpret_cast<uint32_t *>(near.numbers + 1));
        finish(near);
        uint64_t elapsed = 0;
        MUST(cudaMemcpy(&elapsed, near.numbers, sizeof elapsed, cudaMemcpyDeviceToHost));
        return elapsed / 1e3 / kChainSteps;
    }

    Settings settings_;
    int count_ = 0;
    uint32_t seed_ = 0;
    std::map<int, Card> cards_;
};
