#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace tinykv {
namespace {

std::vector<const Kernels*> find() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found.push_back(kernels_avx512());
  if (avx2) found.push_back(kernels_avx2());
#endif
  found.push_back(kernels_base());
  return found;
}

const std::vector<const Kernels*>& usable() {
  static const std::vector<const Kernels*> found = find();
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{usable().front()};
  return kernels;
}

}  // namespace

const Kernels& kernels() {
  return *chosen().load(std::memory_order_relaxed);
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.push_back(kernels->name);
  return names;
}

void choose_isa(const std::string& name) {
  std::string known;
  for (const Kernels* kernels : usable()) {
    if (name.empty() || name == kernels->name) {
      chosen().store(kernels);
      return;
    }
    known += known.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  throw std::invalid_argument("there are no kernels for '" + name + "' here; there are: " + known);
}

}  // namespace tinykv
