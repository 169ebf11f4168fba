// The worker's end of memory shared with a service on the same host.
//
// The service makes a memory file, sealed against resizing. It hands the file over through an
// abstract unix socket to the process that sends the token from AttachWorker. The connection stays
// open while this object lives. Its end tells the service that the memory is no longer needed.
//
// The service is not trusted: kind, seals and size are checked before the file is mapped, so that
// every access is within the file. The pages are allocated when the file is mapped. Seals do not
// prevent the service from punching holes into the file. A missing page reads as zeros at the next
// access. That access fails only if the system has no memory for the page, as with any memory.
//
// A process forked from this one does not have the mapping. It has the connection's descriptor,
// which is closed only at exec. So the destructor shuts the connection down: the service is
// notified even while such a child has the descriptor.
#ifndef BALLAST_CLIENT_SESSION_SHARED_MAPPING_H_
#define BALLAST_CLIENT_SESSION_SHARED_MAPPING_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/v1/jobs.pb.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast::client {

class SharedMapping {
 public:
  // NOT_FOUND: no process listens there (another host, another network namespace). UNAVAILABLE: no
  // answer arrived within `limit`, which the message names, or the connection broke.
  // FAILED_PRECONDITION: the service refused, or what it handed over is not a sealed file in
  // ordinary shared memory, of the size of `places`.
  static absl::StatusOr<std::unique_ptr<SharedMapping>> Connect(const v1::SharedMemoryOffer& offer,
                                                                RankMemoryLayout places,
                                                                absl::Duration limit);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  // The places of a chunk of the job; empty if the chunk is not the rank's.
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
