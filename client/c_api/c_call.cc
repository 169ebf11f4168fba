#include "client/c_api/c_call.h"

namespace ballast::client {

CSaid& Said() {
  thread_local CSaid said;
  return said;
}

}  // namespace ballast::client
