// The Train call over gRPC: raw buffers on a completion queue, driven by one thread of its own.
//
// That thread does all sending and receiving. So a sender only queues, and listener calls never
// overlap. The user bounds the queue of unsent buffers (session/send_log.h).
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
