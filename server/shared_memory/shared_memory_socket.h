// The system calls of shared memory's socket, and the messages of its protocol
// (proto/shared_memory_protocol.h). No function here blocks.
#ifndef BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SOCKET_H_
#define BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SOCKET_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast::server {

// Listens on the abstract name `name`. UNAVAILABLE if it is taken, or too long.
absl::StatusOr<FileDescriptor> ListenOnAbstractSocket(const std::string& name);

enum class AcceptResult : uint8_t {
  kAccepted,
  kNoPeer,
  kNoRoom
};  // kNoRoom: no descriptor is left.
AcceptResult AcceptPeer(const FileDescriptor& listener, FileDescriptor& peer);

// The id of the process that connected; 0 if the system does not know it.
int ProcessOf(const FileDescriptor& peer);

// What a peer has sent: a token; nothing so far; the end of its connection; invalid bytes.
enum class Received : uint8_t { kToken, kNothing, kEnd, kJunk };
// Descriptors that arrive with it are closed.
Received ReceiveToken(const FileDescriptor& peer, std::string& token);

// False if the peer has disconnected.
bool SendGrant(const FileDescriptor& peer, int memory_file);
// Sends the first line of `why`, as far as it fits.
void SendRefusal(const FileDescriptor& peer, absl::string_view why);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SOCKET_H_
