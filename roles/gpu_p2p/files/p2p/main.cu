// Does peer-to-peer between these cards work, not only on paper?
//
//   p2p_probe [--mib 64] [--limit 20] [--setup 60] [--nccl /path/to/libnccl.so.2]
//
// For every ordered pair: write and verify by the copy engine, by stores and by loads of a kernel; bandwidth; latency of a dependent load.
// Then small all-reduces of all cards, through peer memory and (with --nccl) through NCCL with and without P2P. Every step has a hard limit.
// Measures only: what is good enough is judged by whoever reads the one JSON object on stdout.
// Exit status: 0 everything was tried, 1 CUDA does not start, 2 wrong usage, 77 there is no GPU (or just one).
#include "measure.cuh"
#include "supervise.h"
#include <cstdlib>

namespace {

struct Gpu {
    std::string uuid, name, bus_id;
};

std::string hex_uuid(const cudaUUID_t &uuid) {
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
        char byte[4];
        std::snprintf(byte, sizeof byte, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", static_cast<unsigned char>(uuid.bytes[i]));
        text += byte;
    }
    return text;
}

// In a child, like everything that touches CUDA: a process that has initialised it must not fork.
Record survey() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    Record record;
    record.integer("code", status).text("cuda", cudaGetErrorName(status)).text("says", cudaGetErrorString(status));
    record.integer("count", status == cudaSuccess ? count : 0);
    std::string gpus;
    for (int gpu = 0; status == cudaSuccess && gpu < count; ++gpu) {
        cudaDeviceProp about;
        MUST(cudaGetDeviceProperties(&about, gpu));
        char bus_id[32] = "";
        MUST(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, gpu));
        Record one;
        one.integer("index", gpu).text("uuid", hex_uuid(about.uuid)).text("name", about.name).text("bus_id", bus_id);
        one.text("compute_capability", std::to_string(about.major) + "." + std::to_string(about.minor));
        gpus += (gpus.empty() ? "" : ", ") + one.json();
    }
    return record.raw("gpus", "[" + gpus + "]");
}

std::string list(const std::vector<Step> &steps, size_t first, size_t last) {
    std::string all;
    for (size_t i = first; i < last; ++i) all += (all.empty() ? "" : ",\n  ") + steps[i].result;
    return "[" + all + "]";
}

int number_after(const std::string &json, const std::string &key) {
    const size_t at = json.find("\"" + key + "\": ");
    return at == std::string::npos ? -1 : std::atoi(json.c_str() + at + key.size() + 4);
}

int usage(const char *why) {
    std::fprintf(stderr, "%s\nusage: p2p_probe [--mib N] [--limit SECONDS] [--setup SECONDS] [--nccl LIBRARY]\n", why);
    return 2;
}

}  // namespace

int main(int argc, char **argv) {
    Settings settings;
    double setup_s = 60;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        if (i + 1 >= argc) return usage(("no value for " + option).c_str());
        const std::string value = argv[i + 1];
        const double number = std::atof(value.c_str());
        if (option == "--nccl") settings.nccl = value;
        else if (option == "--mib" && number >= 4 && number <= 1024) settings.bytes = static_cast<uint64_t>(number) << 20;
        else if (option == "--limit" && number >= 1) settings.limit_s = number;
        else if (option == "--setup" && number >= 1) setup_s = number;
        else return usage(("bad option or value: " + option + " " + value).c_str());
    }
    // The same numbers as nvidia-smi's. All kernels at once: one that is loaded while others wait for each other would never come.
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);

    Supervisor supervisor(settings.limit_s, setup_s);
    std::vector<Step> look(1);
    look[0].run = survey;
    supervisor.run(look);
    const int count = number_after(look[0].result, "count"), code = number_after(look[0].result, "code");
    if (count < 2) {
        std::printf("{\"schema\": \"servelab.p2p/1\", \"survey\": %s}\n", look[0].result.c_str());
        // Without a driver the runtime calls it too old.
        const bool no_driver = code == cudaErrorInsufficientDriver && access("/proc/driver/nvidia/version", F_OK) != 0;
        return code == cudaSuccess || code == cudaErrorNoDevice || no_driver ? 77 : 1;
    }
    if (count > kMaxGpus) return usage("more cards than this probe knows; set CUDA_VISIBLE_DEVICES");

    // One for the whole life of a child; in the parent it is never made.
    std::unique_ptr<Measure> measure;
    const auto with = [&](auto &&step) {
        return [&measure, &settings, step] {
            if (!measure) measure = std::make_unique<Measure>(settings);
            return step(*measure);
        };
    };
    std::vector<Step> steps;
    const auto add = [&](Record names, std::function<Record()> run, bool alone = false) { steps.push_back({names, run, alone, ""}); };
    for (int gpu = 0; gpu < count; ++gpu)
        add(Record().integer("gpu", gpu), with([gpu](Measure &m) { return m.host(gpu); }));
    const size_t pairs = steps.size();
    for (int from = 0; from < count; ++from)
        for (int to = 0; to < count; ++to)
            if (from != to)
                add(Record().integer("from", from).integer("to", to), with([from, to](Measure &m) { return m.pair(from, to); }));
    const size_t reduces = steps.size();
    for (const uint32_t bytes : {4096u, 65536u, 1048576u})
        add(Record().text("way", "peer memory"), with([bytes](Measure &m) { return m.all_reduce(bytes); }));
    if (!settings.nccl.empty())
        for (const bool p2p : {true, false})
            add(Record().text("way", p2p ? "NCCL" : "NCCL, P2P off"), with([p2p](Measure &m) { return m.nccl(65536, p2p); }), true);
    supervisor.run(steps);
    std::printf("{\"schema\": \"servelab.p2p/1\", \"mib\": %llu, \"limit_s\": %g, \"survey\": %s,\n \"host\": %s,\n \"pairs\": %s,\n \"all_reduce\": %s}\n",
                static_cast<unsigned long long>(settings.bytes >> 20), settings.limit_s, look[0].result.c_str(), list(steps, 0, pairs).c_str(),
                list(steps, pairs, reduces).c_str(), list(steps, reduces, steps.size()).c_str());
    return 0;
}
