// The worker's end of memory shared with a service on the same host.
//
// The service makes a memory file, sealed against growing and shrinking, and hands it over an
// abstract unix socket to whoever shows the token that AttachWorker gave this rank. The connection
// stays open for as long as this lives: its end tells the service that the memory is not needed.
// Nothing of the service is trusted: kind, seals and size are checked before the file is mapped, so
// that no access to the mapping can lie beyond the file's end. Its pages are taken when it is
// mapped. Seals do not keep the service from punching holes into the file; a page that is gone so
// comes back as zeros at the next access, and only where the system has no memory left for it does
// that access fail, as with any other memory.
//
// A process forked from this one does not have the mapping. The connection is closed at exec only,
// so it is shut down here: the service hears of the end even while such a child holds it.
#ifndef BALLAST_CLIENT_SESSION_SHARED_MAPPING_H_
#define BALLAST_CLIENT_SESSION_SHARED_MAPPING_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/common/file_descriptor.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"

namespace ballast::client {

class SharedMapping {
 public:
  // NOT_FOUND: nobody listens there (another host, another network namespace). UNAVAILABLE: no
  // answer came within `limit`, which the message names, or the connection broke.
  // FAILED_PRECONDITION: the service refused, or what it handed over is not a sealed file, in
  // ordinary shared memory, of the size that `places` says.
  static absl::StatusOr<std::unique_ptr<SharedMapping>> Connect(const v1::SharedMemoryOffer& offer,
                                                                RankMemoryLayout places,
                                                                absl::Duration limit);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  // The places of a chunk of the job; empty if it is not the rank's.
  absl::Span<std::byte> gradient(int chunk) const;
  absl::Span<std::byte> weights(int chunk) const;

 private:
  SharedMapping(RankMemoryLayout places, FileDescriptor connection, std::byte* memory);
  absl::Span<std::byte> At(const RankMemoryLayout::Place& place) const;

  const RankMemoryLayout places_;
  const FileDescriptor connection_;
  std::byte* const memory_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_SHARED_MAPPING_H_
