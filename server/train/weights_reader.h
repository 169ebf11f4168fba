// One ReadWeights call: committed weights, or directions, chunk after chunk.
#ifndef BALLAST_SERVER_TRAIN_WEIGHTS_READER_H_
#define BALLAST_SERVER_TRAIN_WEIGHTS_READER_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <string>
#include <vector>

#include "ballast/v1/train.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"
#include "server/call_pool.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. One chunk is in memory at a time.
class WeightsReader final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  // The engine and the pools outlive it.
  WeightsReader(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
                const absl::StatusOr<Caller>& caller, const grpc::ByteBuffer& request);

  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  // The first message of the answer.
  absl::StatusOr<v1::ReadWeightsResponse> Open(const Engine& engine, const Caller& caller,
                                               const grpc::ByteBuffer& request);
  absl::Status ChooseChunks(const v1::ReadWeightsRequest& request);
  absl::StatusOr<grpc::ByteBuffer> NextChunk();
  void Write(grpc::ByteBuffer bytes);

  CallPools& pools_;
  CallPool::Place place_;
  const std::shared_ptr<WatchedCall> watched_;
  std::shared_ptr<Job> job_;
  Generation generation_;  // A load while chunks are read ends the call.
  uint64_t step_ = 0;
  bool directions_ = false;  // They are read, not weights.
  std::string process_id_;   // Of who shares memory and reads them.
  int first_of_rank_ = 0;    // Layout::first_of_rank of the rank whose weights are read.
  std::vector<int> chunks_;
  size_t next_ = 0;
  grpc::ByteBuffer write_buffer_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_WEIGHTS_READER_H_
