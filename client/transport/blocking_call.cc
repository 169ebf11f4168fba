#include "client/transport/blocking_call.h"

#include <utility>

#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {

BlockingCall::BlockingCall(std::shared_ptr<grpc::Channel> channel, const std::string& method,
                           absl::Duration limit, CallsUnderWay& calls)
    : entry_(calls, context_), stub_(std::move(channel)) {
  context_.set_deadline(proto::Deadline(limit));
  call_ = stub_.PrepareCall(&context_, method, &queue_);
  // One operation is under way at a time, so this object can be the tag of all of them.
  call_->StartCall(this);
  Wait();  // If the call has already failed, the next operation returns false.
}

BlockingCall::~BlockingCall() {
  if (!finished_) {
    context_.TryCancel();
    Finish().IgnoreError();
  }
  // gRPC requires an empty queue before it is destroyed.
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool BlockingCall::Wait() {
  void* tag = nullptr;
  bool ok = false;
  // It needs no limit: the call's deadline, and a cancellation, end every operation.
  return queue_.Next(&tag, &ok) && ok;
}

bool BlockingCall::Write(const grpc::ByteBuffer& message) {
  call_->Write(message, this);
  return Wait();
}

bool BlockingCall::WritesDone() {
  call_->WritesDone(this);
  return Wait();
}

bool BlockingCall::Read(grpc::ByteBuffer* message) {
  call_->Read(message, this);
  return Wait();
}

absl::Status BlockingCall::Finish() {
  finished_ = true;
  grpc::Status status;
  call_->Finish(&status, this);
  Wait();
  return proto::FromGrpc(status);
}

}  // namespace ballast::client
