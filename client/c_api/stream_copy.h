// A copy of memory that is not read again soon.
#ifndef BALLAST_CLIENT_C_API_STREAM_COPY_H_
#define BALLAST_CLIENT_C_API_STREAM_COPY_H_

#include <cstddef>

namespace ballast::client {

// As std::memcpy. A large copy goes past the caches: what is at `to` is not read first, which takes
// two thirds of the traffic. A thread that is notified afterwards sees it as any other write.
void StreamCopy(void* to, const void* from, size_t bytes);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_STREAM_COPY_H_
