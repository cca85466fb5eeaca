#pragma once
// Which kernels serve on this processor.
#include <string>
#include <vector>

#include "kernel_table.h"

namespace tinykv {

// The kernels in use; the best this processor runs, unless choose_isa() said otherwise.
const Kernels& kernels();

// Names of the instruction sets this build has and this processor runs, best first; the last is "base".
std::vector<std::string> isas();

// Uses the kernels called `name` from now on, "" for the best. Throws std::invalid_argument for others than isas().
void choose_isa(const std::string& name);

}  // namespace tinykv
