// The system calls of the shared memory's side socket, and what its peers may say
// (proto/shared_memory_protocol.h). Nothing here blocks.
#ifndef BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SOCKET_H_
#define BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SOCKET_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/file_descriptor.h"

namespace ballast::server {

// Listens on the abstract name `name`. UNAVAILABLE if it is taken, or too long.
absl::StatusOr<FileDescriptor> ListenOnAbstractSocket(const std::string& name);

enum class AcceptResult : uint8_t { kAccepted, kNobody, kNoRoom };  // kNoRoom: of descriptors.
AcceptResult AcceptPeer(const FileDescriptor& listener, FileDescriptor& peer);

int ProcessOf(const FileDescriptor& peer);  // Its id when it connected; 0: not known.

// What a peer has said: a token; nothing so far; that it is gone; something else.
enum class Heard : uint8_t { kToken, kNothing, kEnd, kJunk };
// Descriptors that come along are never taken.
Heard HearToken(const FileDescriptor& peer, std::string& token);

// False if the peer is gone.
bool SayGranted(const FileDescriptor& peer, int memory_file);
// `why` is cut to one line of the bytes that fit.
void SayRefused(const FileDescriptor& peer, absl::string_view why);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SOCKET_H_
