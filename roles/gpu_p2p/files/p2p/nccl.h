// The few calls of NCCL that an all-reduce needs, from a library that is named at run time: the toolchain has none.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdexcept>
#include <string>

class Nccl {
  public:
    using Comm = void *;
    static constexpr int kFloat32 = 7, kSum = 0;  // ncclFloat32, ncclSum

    explicit Nccl(const std::string &path) {
        handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!handle_) throw std::runtime_error(std::string("NCCL cannot be loaded: ") + dlerror());
        find("ncclGetVersion", get_version);
        find("ncclGetErrorString", error_string);
        find("ncclCommInitAll", comm_init_all);
        find("ncclGroupStart", group_start);
        find("ncclGroupEnd", group_end);
        find("ncclAllReduce", all_reduce);
    }
    void must(int status, const char *what) const {
        if (status) throw std::runtime_error(std::string("NCCL: ") + what + ": " + error_string(status));
    }

    int (*get_version)(int *);
    const char *(*error_string)(int);
    int (*comm_init_all)(Comm *, int, const int *);
    int (*group_start)();
    int (*group_end)();
    int (*all_reduce)(const void *, void *, size_t, int, int, Comm, cudaStream_t);

  private:
    template <typename Function> void find(const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(handle_, name));
        if (!function) throw std::runtime_error(std::string("NCCL has no ") + name);
    }
    void *handle_;
};
