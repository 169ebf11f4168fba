// The Train call over gRPC: raw buffers on a completion queue that one thread of its own drives.
//
// That thread does all sending and receiving, so a sender only queues, and the listener is never
// called twice at once. The queue of unsent buffers is bounded by its user (session/send_log.h).
#ifndef BALLAST_CLIENT_TRANSPORT_TRAIN_CALL_H_
#define BALLAST_CLIENT_TRANSPORT_TRAIN_CALL_H_

#include <grpcpp/channel.h>

#include <memory>

#include "client/transport/transport.h"

namespace ballast::client {

// The message for one gradient in shared memory. More chunks can be added to it.
v1::TrainRequest SharedGradientRequest(const v1::GradientHeader& header);

std::unique_ptr<TrainCall> OpenGrpcTrainCall(std::shared_ptr<grpc::Channel> channel,
                                             TrainListener& listener);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_TRAIN_CALL_H_
