#include "tests/bench/wire/wire.h"

#include <cstring>

namespace ballast::bench {

SendMemory::SendMemory() : memory_(new std::byte[kMessages * kMessageBytes]) {
  std::memset(memory_.get(), 1, kMessages * kMessageBytes);
}

}  // namespace ballast::bench
