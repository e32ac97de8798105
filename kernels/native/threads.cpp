// How many threads an operation has, and the memory that each of them keeps. Compiled for any processor.
#include <omp.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "native.h"

namespace batchllm {

int num_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

namespace {
constexpr size_t kHugePageBytes = 2 << 20;

struct Slots {
  void* memory[kNumScratchSlots] = {};
  size_t size[kNumScratchSlots] = {};
  ~Slots() {
    for (void* m : memory) std::free(m);
  }
};
}  // namespace

void* scratch(ScratchSlot slot, size_t num_bytes) {
  static thread_local Slots slots;
  if (num_bytes > slots.size[slot]) {
    std::free(slots.memory[slot]);
    // Rows of a pass lie in hundreds of small pages, each of which a core has to find again and again.
    const size_t wanted = num_bytes + num_bytes / 4, page = wanted > kHugePageBytes / 2 ? kHugePageBytes : 4096;
    const size_t size = (wanted + page - 1) / page * page;
    slots.memory[slot] = std::aligned_alloc(page, size);
#ifdef MADV_HUGEPAGE
    if (page == kHugePageBytes && slots.memory[slot] != nullptr) madvise(slots.memory[slot], size, MADV_HUGEPAGE);
#endif
    slots.size[slot] = size;
    if (slots.memory[slot] == nullptr) {
      std::fprintf(stderr, "batchllm: no memory for %zu bytes of scratch\n", size);
      std::abort();
    }
  }
  return slots.memory[slot];
}

}  // namespace batchllm
