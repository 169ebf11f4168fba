#include "client/c_api/c_call.h"

namespace ballast::client {

std::string& CMessage() {
  thread_local std::string message;
  return message;
}

}  // namespace ballast::client
