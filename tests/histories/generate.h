// Makes histories.
#ifndef BALLAST_TESTS_HISTORIES_GENERATE_H_
#define BALLAST_TESTS_HISTORIES_GENERATE_H_

#include <cstdint>

#include "tests/histories/history.h"

namespace ballast::histories {

// The same history for the same seed, on every machine.
History Generate(uint64_t seed);

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_GENERATE_H_
