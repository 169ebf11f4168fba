// The messages on the unix socket over which a worker gets its memory shared with the service.
// SOCK_SEQPACKET, one message each way:
//
//   worker   the offer's token, kSharedMemoryTokenBytes bytes
//   service  one byte kSharedMemoryGranted with the memory file's descriptor (SCM_RIGHTS), or one
//            byte kSharedMemoryRefused and a reason, one line of at most
//            kMaxSharedMemoryRefusalBytes; then it closes the connection
//
// After a grant the connection stays open, without messages, while the worker uses the memory.
#ifndef BALLAST_PROTO_SHARED_MEMORY_PROTOCOL_H_
#define BALLAST_PROTO_SHARED_MEMORY_PROTOCOL_H_

#include <cstddef>

namespace ballast::proto {

inline constexpr size_t kSharedMemoryTokenBytes = 32;
inline constexpr size_t kMaxSharedMemoryRefusalBytes = 512;
inline constexpr char kSharedMemoryGranted = 'G';
inline constexpr char kSharedMemoryRefused = 'R';

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_SHARED_MEMORY_PROTOCOL_H_
