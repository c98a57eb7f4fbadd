"""`plain_loop.py` on every core: `tutti run -n 2 examples/own_loop.py`. Three lines differ."""

import torch
import tutti
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
samples = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
training, test = TensorDataset(*samples[:1400]), TensorDataset(*samples[1400:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
model, optimizer = tutti.distribute(model, optimizer)
loader = DataLoader(training, batch_size=64, shuffle=True)

for _ in range(10):
    for inputs, targets in tutti.shard(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

with torch.no_grad():
    inputs, targets = test[:]
    correct = (model(inputs).argmax(1) == targets).sum().item()
print(f"{correct} of {len(test)} correct")
