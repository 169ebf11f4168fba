// Data about the start of a service's process.
#ifndef BALLAST_SERVER_STATUS_SERVICE_HISTORY_H_
#define BALLAST_SERVER_STATUS_SERVICE_HISTORY_H_

#include <cstdint>

namespace ballast::server {

struct ServiceHistory {
  uint64_t deaths = 0;  // Crashes of earlier processes of this service, by its parent's count.
  double recovery_seconds =
      0;  // What taking over their jobs took; 0: there was nothing to take over.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_SERVICE_HISTORY_H_
