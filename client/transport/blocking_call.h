// One streaming RPC of raw buffers, used from one thread that waits for each operation.
#ifndef BALLAST_CLIENT_TRANSPORT_BLOCKING_CALL_H_
#define BALLAST_CLIENT_TRANSPORT_BLOCKING_CALL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/transport/calls_under_way.h"

namespace ballast::client {

class BlockingCall {
 public:
  // `method` as in "/package.Service/Method". The whole call ends with DEADLINE_EXCEEDED after
  // `limit`, and with CANCELLED when `calls` are cancelled.
  BlockingCall(std::shared_ptr<grpc::Channel> channel, const std::string& method,
               absl::Duration limit, CallsUnderWay& calls);
  ~BlockingCall();  // Cancels an unfinished call.
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;

  // False when the call is over; Finish returns the reason.
  bool Write(const grpc::ByteBuffer& message);
  bool WritesDone();
  bool Read(grpc::ByteBuffer* message);
  // Call once, after one of the above returned false or after the last Read.
  absl::Status Finish();

 private:
  bool Wait();

  grpc::ClientContext context_;
  CallsUnderWay::Entry entry_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool finished_ = false;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_BLOCKING_CALL_H_
