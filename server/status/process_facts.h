// What the system says of this process.
#ifndef BALLAST_SERVER_STATUS_PROCESS_FACTS_H_
#define BALLAST_SERVER_STATUS_PROCESS_FACTS_H_

#include <cstdint>
#include <string>

namespace ballast::server {

struct ProcessFacts {
  double cpu_seconds = 0;
  double start_time_seconds = 0;  // Since 1970.
  int64_t resident_bytes = 0;
  int64_t virtual_bytes = 0;
  int64_t threads = 0;
  int64_t open_descriptors = 0;
  int64_t most_descriptors = 0;
};
// What the system does not say is 0.
ProcessFacts ReadProcessFacts();

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_PROCESS_FACTS_H_
