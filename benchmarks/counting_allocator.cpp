// A CPU allocator that counts the bytes which PyTorch holds, and passes every request on to the one before it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/extension.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

c10::Allocator* underlying = nullptr;
std::mutex guard;  // autograd allocates on other threads
std::unordered_map<void*, int64_t> sizes;  // of blocks that were allocated since the installation
int64_t live_bytes = 0;
int64_t peak_bytes = 0;

void release(void* block) {
  if (block == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(guard);
    if (auto found = sizes.find(block); found != sizes.end()) {
      live_bytes -= found->second;
      sizes.erase(found);
    }
  }
  underlying->raw_deallocate(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = underlying->raw_allocate(bytes);
    if (block != nullptr) {
      std::lock_guard<std::mutex> lock(guard);
      sizes[block] = static_cast<int64_t>(bytes);
      live_bytes += static_cast<int64_t>(bytes);
      peak_bytes = std::max(peak_bytes, live_bytes);
    }
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

CountingAllocator counting;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", [] {
    if (underlying != nullptr) return;
    underlying = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&counting, /*priority=*/100);
  });
  module.def("live", [] {
    std::lock_guard<std::mutex> lock(guard);
    return live_bytes;
  });
  module.def("peak", [] {
    std::lock_guard<std::mutex> lock(guard);
    return peak_bytes;
  });
  module.def("owns", [](uintptr_t block) {
    std::lock_guard<std::mutex> lock(guard);
    return sizes.count(reinterpret_cast<void*>(block)) > 0;
  });
  module.def("reset", [] {
    std::lock_guard<std::mutex> lock(guard);
    peak_bytes = live_bytes;
  });
}
